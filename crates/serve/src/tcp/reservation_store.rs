//! Persistent reservation state in files (persistence through power loss).
//!
//! ```text
//!   DIRECTORY/lock                        locked while a process uses the directory
//!   DIRECTORY/reservations-HASH-NSID      four lines of text, followed by the record:
//!
//!     tenmil reservations 2
//!     subsystem NQN
//!     namespace NSID
//!     disk IDENTITY
//! ```
//!
//! Reservations belong to a disk, not to a namespace number: a file whose disk differs from the one
//! exported under its number is rejected. A file of the first format (`NQN`, a line feed and the
//! record) does not name its disk and is rejected as well. Either is adopted on request, once,
//! by [`adopt_records`](StateDirectory::adopt_records).
//!
//! An update writes a new file beside the old one, syncs it, renames it and syncs the directory.
//! After a power loss at any point, one of the two files is complete. If only the last step fails,
//! the change is rejected and the old file is restored. A dedicated thread writes the files one at
//! a time, in the order of submission; reactors never wait for it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tenmil_base::Error;

use tenmil_linux::owned_directory::OwnedDirectory;
use tenmil_linux::thread_pool::{BlockingTask, PoolHandle, ThreadPool};
use tenmil_nvme_controller::controller::{PersistRequest, ReservationStore};

mod memory_directory;
mod record_file;
#[cfg(test)]
mod tests;

pub use memory_directory::MemoryDirectory;
use record_file::{RecordFile, RecordOwner, StateFs};

/// Directory of persistent state. While it or one of its reservation stores exists, no other process can
/// use the directory. Dropping it waits until everything submitted has been written.
#[derive(Debug)]
pub struct StateDirectory {
    disk: LockedDirectory,
    writer: ThreadPool,
    /// Files to adopt, whatever disk they name, each by its first reservation store.
    adopted: Mutex<BTreeSet<String>>,
}

/// Reservations of one namespace.
struct ReservationFile<D> {
    file: RecordFile<D>,
    writer_pool: PoolHandle,
    found: Result<Option<Vec<u8>>, Error>,
}

#[derive(Clone, Debug)]
struct LockedDirectory {
    path: PathBuf,
    files: OwnedDirectory,
    _lock: Arc<File>,
}

/// Prefix of record file names.
const PREFIX: &str = "reservations-";
/// Longest wait for the stored record when a namespace is exported.
const TIME_LIMIT: Duration = Duration::from_secs(10);
/// Largest number of records that wait to be written: one for each namespace, and for removed ones.
const WAITING_MAX: usize = 1 << 16;

impl StateDirectory {
    /// Opens the directory at `path`, creating it if needed.
    ///
    /// # Errors
    ///
    /// A one-line message, if the directory cannot be opened or is locked by another process.
    pub fn open(path: &Path) -> Result<Self, Error> {
        let shown = path.display();
        let wrong = |error: io::Error| format!("open the state directory {shown}: {error}");
        let files = OwnedDirectory::open(path).map_err(wrong).map_err(Error::environment)?;
        let lock = files.lock_file("lock").map_err(wrong).map_err(Error::environment)?;
        lock.try_lock()
            .map_err(|_| format!("use the state directory {shown}: another process uses it"))
            .map_err(Error::environment)?;
        let disk = LockedDirectory { path: path.to_owned(), files, _lock: Arc::new(lock) };
        Ok(Self { disk, writer: ThreadPool::new(1, WAITING_MAX), adopted: Mutex::default() })
    }

    /// Adopts these files, whatever disk they name: each is assigned, once, to the disk that is
    /// exported under its number.
    ///
    /// # Errors
    ///
    /// A one-line message, if one of them does not exist.
    pub fn adopt_records(self, names: &[String]) -> Result<Self, Error> {
        let directory = self.disk.path.display();
        for name in names {
            let is_record =
                name.starts_with(PREFIX) && !name.contains('/') && !name.ends_with(".new");
            match self.disk.read(name) {
                Ok(Some(_)) if is_record => {}
                Err(error) if is_record => {
                    return Err(Error::environment(format!("adopt {directory}/{name}: {error}")));
                }
                _ => {
                    return Err(Error::environment(format!(
                        "adopt `{name}`: it is not a reservation file in {directory}, expected the name of a file there \
                         that begins with {PREFIX}"
                    )));
                }
            }
        }
        Ok(Self { adopted: Mutex::new(names.iter().cloned().collect()), ..self })
    }

    /// Returns the store of a namespace's reservations. `disk` is the identity of its disk: a line
    /// of text that no other disk has and that does not change across restarts. Blocks until the
    /// stored record has been read.
    #[must_use]
    pub fn reservation_store(&self, nqn: &str, nsid: u32, disk: &str) -> Box<dyn ReservationStore> {
        let name = record_file_name(nqn, nsid);
        let shown = self.disk.path.join(&name).display().to_string();
        let is_adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        let owner =
            RecordOwner { nqn: nqn.to_owned(), nsid, disk: disk.replace(char::is_control, "?") };
        let file = RecordFile { disk: self.disk.clone(), name, owner, shown };
        Box::new(ReservationFile::new(file, self.writer.handle(), is_adopted))
    }
}

/// File name of a record. The NQN is hashed, so none of its characters can be harmful.
fn record_file_name(nqn: &str, nsid: u32) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{PREFIX}{hash:016x}-{nsid}")
}

impl<D: StateFs + Clone + 'static> ReservationStore for ReservationFile<D> {
    fn load(&self) -> Result<Option<Vec<u8>>, Error> {
        self.found.clone()
    }

    fn start_store(
        &mut self,
        record: Option<Vec<u8>>,
        stored: PersistRequest,
    ) -> Result<(), PersistRequest> {
        let (mut file, writer_pool) = (self.file.clone(), self.writer_pool.clone());
        // A rejected job is dropped; the completion callback must survive that.
        let stored = Arc::new(Mutex::new(Some(stored)));
        let job_stored = Arc::clone(&stored);
        let job = BlockingTask::new("keep reservations", move || {
            let written = file.write_record(record.as_deref());
            if let Some(stored) = take_stored_request(&job_stored) {
                stored.complete_write(written);
            }
        });
        match writer_pool.submit(job) {
            Ok(()) => Ok(()),
            Err(_) => take_stored_request(&stored).map_or(Ok(()), Err),
        }
    }
}

fn take_stored_request(stored: &Mutex<Option<PersistRequest>>) -> Option<PersistRequest> {
    stored.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<D: StateFs> ReservationFile<D> {
    /// Reads the stored record, after everything submitted earlier has been written.
    fn new(file: RecordFile<D>, writer_pool: PoolHandle, is_adopted: bool) -> Self
    where
        D: Clone + 'static,
    {
        let (sender, receiver) = channel();
        let mut reads = file.clone();
        // This caller may block. If the pool rejects the job, the channel reports that.
        let job = BlockingTask::new("read reservations", move || {
            let adopted = if is_adopted { reads.adopt_for_disk() } else { Ok(()) };
            let _ = sender.send(adopted.and_then(|()| reads.read_record()));
        });
        let wrong = format!("read {}: the writer thread has ended", file.shown);
        let submitted = writer_pool.submit(job);
        let found = match submitted {
            Ok(()) => receiver.recv_timeout(TIME_LIMIT).unwrap_or_else(|error| match error {
                RecvTimeoutError::Disconnected => Err(Error::environment(wrong)),
                RecvTimeoutError::Timeout => Err(Error::environment(format!(
                    "read {}: no response for {} s: earlier writes may still be in progress, or the disk \
                     does not respond",
                    file.shown,
                    TIME_LIMIT.as_secs()
                ))),
            }),
            Err(_) => Err(Error::environment(wrong)),
        };
        Self { file, writer_pool, found }
    }
}

impl StateFs for LockedDirectory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.files.read_file(name)
    }

    fn write_pending(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.files.write_file(name, bytes)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.files.sync_file(name)
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.files.rename_file(from, to)
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.files.remove_file(name)
    }

    fn sync_directory(&mut self) -> io::Result<()> {
        self.files.sync_entries()
    }
}

impl<D> fmt::Debug for ReservationFile<D> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("ReservationFile").field("name", &self.file.name).finish_non_exhaustive()
    }
}
