//! Records in memory, for simulations: no thread writes them, and they outlive a service.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ctrl::controller::{Keeper, Stored};

use super::name_of;
use super::place::{Disk, Of, Place};

/// The state directory of a simulated target. A handle: clones are the same directory.
#[doc(hidden)]
#[derive(Clone, Default)]
pub struct MemoryDirectory(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// Records that are not written yet.
    waiting: VecDeque<Waiting>,
}

struct Waiting {
    file: Place<MemoryDirectory>,
    record: Option<Vec<u8>>,
    stored: Stored,
}

struct Kept {
    file: Place<MemoryDirectory>,
}

impl MemoryDirectory {
    /// As [`StateDirectory::keeper`](super::StateDirectory::keeper).
    #[must_use]
    pub fn keeper(&self, nqn: &str, nsid: u32, disk: &str) -> Box<dyn Keeper> {
        let name = name_of(nqn, nsid);
        let of = Of { nqn: nqn.to_owned(), nsid, disk: disk.to_owned() };
        Box::new(Kept { file: Place { disk: self.clone(), shown: name.clone(), name, of } })
    }

    /// Writes the records that wait. True if there were any.
    pub fn write(&self) -> bool {
        let mut is_busy = false;
        loop {
            // Nothing is locked while the service hears of it.
            let next = self.lock().waiting.pop_front();
            let Some(Waiting { mut file, record, stored }) = next else { return is_busy };
            stored.ended(file.write(record.as_deref()));
            is_busy = true;
        }
    }

    /// The process is killed: what waits is never written.
    pub fn forget(&self) {
        let forgotten = std::mem::take(&mut self.lock().waiting);
        drop(forgotten);
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Keeper for Kept {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        self.file.read()
    }

    fn store(&mut self, record: Option<Vec<u8>>, stored: Stored) -> Result<(), Stored> {
        let file = self.file.clone();
        self.file.disk.lock().waiting.push_back(Waiting { file, record, stored });
        Ok(())
    }
}

impl Disk for MemoryDirectory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.lock().files.get(name).cloned())
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.lock().files.insert(name.to_owned(), bytes.to_vec());
        Ok(())
    }

    fn sync(&mut self, _: &str) -> io::Result<()> {
        Ok(())
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        let mut state = self.lock();
        let bytes = state.files.remove(from).ok_or(io::ErrorKind::NotFound)?;
        state.files.insert(to.to_owned(), bytes);
        Ok(())
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.lock().files.remove(name);
        Ok(())
    }

    fn sync_names(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for MemoryDirectory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("MemoryDirectory").finish_non_exhaustive()
    }
}
