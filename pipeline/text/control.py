"""Control tokens of published masked-diffusion checkpoints, by what they are for: Dream's and DiffuCoder's name, then LLaDA's."""

MASKS = ("<|mask|>", "<|mdm_mask|>")
BEGINS = ("<|beginoftext|>", "<|startoftext|>")  # before a text; never predicted
PADS = ("<|pad|>",)
TURN_ENDS = ("<|im_end|>", "<|eot_id|>")
END_OF_TEXT = "<|endoftext|>"  # fills a canvas
