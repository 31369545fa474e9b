// Conversations in the browser's own database (IndexedDB): they outlive the tab and never leave this machine by themselves.

const TABLE = "conversations";
let opened = null;

const done = (request) =>
  new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });

function open() {
  const request = indexedDB.open("stagecoach", 1);
  request.onupgradeneeded = () => request.result.createObjectStore(TABLE, { keyPath: "id" });
  return done(request);
}

async function table(mode) {
  opened ??= open();
  return (await opened).transaction(TABLE, mode).objectStore(TABLE);
}

export const all = async () => (await done((await table("readonly")).getAll())).sort((one, other) => other.updated - one.updated);
export const put = async (data) => done((await table("readwrite")).put(data));
export const remove = async (id) => done((await table("readwrite")).delete(id));
