//! Reservation records in memory, for simulations: they outlive a service, and no thread writes
//! them.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tenmil_base::Error;

use tenmil_nvme_controller::controller::{PersistRequest, ReservationStore};

use super::record_file::{RecordFile, RecordOwner, StateFs};
use super::record_file_name;

/// State directory of a simulated target. A handle: clones share the directory.
#[doc(hidden)]
#[derive(Clone, Default)]
pub struct MemoryDirectory(Arc<Mutex<MemoryState>>);

#[derive(Default)]
struct MemoryState {
    files: BTreeMap<String, Vec<u8>>,
    /// Records not written yet.
    pending: VecDeque<PendingWrite>,
}

struct PendingWrite {
    file: RecordFile<MemoryDirectory>,
    record: Option<Vec<u8>>,
    stored: PersistRequest,
}

struct MemoryReservations {
    file: RecordFile<MemoryDirectory>,
}

impl MemoryDirectory {
    /// Same as [`StateDirectory::reservation_store`](super::StateDirectory::keeper).
    #[must_use]
    pub fn reservation_store(&self, nqn: &str, nsid: u32, disk: &str) -> Box<dyn ReservationStore> {
        let name = record_file_name(nqn, nsid);
        let owner = RecordOwner { nqn: nqn.to_owned(), nsid, disk: disk.to_owned() };
        Box::new(MemoryReservations {
            file: RecordFile { disk: self.clone(), shown: name.clone(), name, owner },
        })
    }

    /// Writes the pending records. Returns whether there were any.
    pub fn complete_pending_writes(&self) -> bool {
        let mut is_busy = false;
        loop {
            // The lock is not held during the completion callback.
            let next = self.lock().pending.pop_front();
            let Some(PendingWrite { mut file, record, stored }) = next else { return is_busy };
            stored.complete_write(file.write_record(record.as_deref()));
            is_busy = true;
        }
    }

    /// Drops pending records, as if the process were killed.
    pub fn discard_pending_writes(&self) {
        let dropped = std::mem::take(&mut self.lock().pending);
        drop(dropped);
    }

    fn lock(&self) -> MutexGuard<'_, MemoryState> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl ReservationStore for MemoryReservations {
    fn load(&self) -> Result<Option<Vec<u8>>, Error> {
        self.file.read_record()
    }

    fn start_store(
        &mut self,
        record: Option<Vec<u8>>,
        stored: PersistRequest,
    ) -> Result<(), PersistRequest> {
        let file = self.file.clone();
        self.file.disk.lock().pending.push_back(PendingWrite { file, record, stored });
        Ok(())
    }
}

impl StateFs for MemoryDirectory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        Ok(self.lock().files.get(name).cloned())
    }

    fn write_pending(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
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

    fn sync_directory(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl fmt::Debug for MemoryDirectory {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("MemoryDirectory").finish_non_exhaustive()
    }
}
