"""A source that starts threads by clone(2), without pthread_create and its stacks; data for the attacks. x86_64 only.

Standard library only.
"""

import platform
import struct

PTHREAD = 0x3D0F00  # glibc's flags: VM FS FILES SIGHAND THREAD SYSVSEM SETTLS PARENT_SETTID CHILD_CLEARTID
AVAILABLE = platform.machine() == "x86_64"


def _code() -> bytes:
    """long start(long flags, long count): how many threads could be started. They sleep, and none uses its stack."""
    enter = bytes.fromhex("53 4154 4155 4989fc 4989f5 31db")  # push rbx, r12, r13; r12 = flags; r13 = count; ebx = 0
    leave = bytes.fromhex("89d8 415d 415c 5b c3")  # eax = ebx; pop r13, r12, rbx; ret
    # eax = 56; rdi = r12; rsi = rsp; rdx = r10 = r8 = word
    clone = bytes.fromhex("b838000000 4c89e7 4889e6 488d15") + b"%word" + bytes.fromhex("4989d2 4989d0 0f05 85c0")
    back = 2 + 2 + 2 + 2  # jz, js, inc, jmp
    loop = 3 + 2 + len(clone) - 5 + 4 + back  # cmp, jge
    asleep = bytes.fromhex("b823000000 488d3d") + b"%time" + bytes.fromhex("31f6 0f05")  # eax = 35; rdi = time; rsi = 0
    size = len(asleep) - 5 + 4 + 2
    child = len(enter) + loop + len(leave)
    time, word = child + size, child + size + 16
    place = len(enter) + 5 + clone.index(b"%word") + 4
    clone = clone.replace(b"%word", struct.pack("<i", word - place))
    asleep = asleep.replace(b"%time", struct.pack("<i", time - (child + asleep.index(b"%time") + 4)))
    done = len(enter) + loop
    at = len(enter) + 5 + len(clone)
    jumps = bytes([0x74, child - (at + 2), 0x78, done - (at + 4), 0xFF, 0xC3, 0xEB, (len(enter) - (at + 8)) & 255])
    test = bytes([0x4C, 0x39, 0xEB, 0x7D, done - (len(enter) + 5)])  # cmp rbx, r13; jge done
    asleep += bytes([0xEB, (-size) & 255])
    return enter + test + clone + jumps + leave + asleep + struct.pack("<qqq", 1000, 0, 0)


# `start(flags, count)`, the number of threads that could be started
START = f"""
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
CODE = bytes.fromhex("{_code().hex()}")
PLACE = libc.mmap(None, ctypes.c_size_t(4096), 7, 0x22, -1, ctypes.c_long(0))
ctypes.memmove(PLACE, CODE, len(CODE))
start = ctypes.CFUNCTYPE(ctypes.c_long, ctypes.c_long, ctypes.c_long)(PLACE)
"""
