//! Reservations in files, so that they survive a loss of power.
//!
//! ```text
//!   DIRECTORY/lock                        locked while a process serves from here
//!   DIRECTORY/reservations-HASH-NSID      four lines of text, and the record behind them:
//!
//!     tenmil reservations 2
//!     subsystem NQN
//!     namespace NSID
//!     disk IDENTITY
//! ```
//!
//! Reservations are those of a disk, not of a number: a file whose disk is another than the one that is
//! served under its number is refused. So is one of the first format, `NQN`, a line feed and the record,
//! which does not name its disk. Either is taken over on request, once, by
//! [`adopting`](StateDirectory::adopting).
//!
//! A file is written beside the one it replaces, made durable, given its name, and the name made
//! durable: whenever the power goes, the one or the other is there, whole. If only the last of that
//! fails, the change is refused, and the old file gets its name back. A thread of its own does
//! that, one file after the other in the order in which they were handed in; nobody who serves a host
//! waits for it.

use std::collections::BTreeSet;
use std::fmt;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use ctrl::controller::{Keeper, Stored};
use host::owned_directory::OwnedDirectory;
use host::pool::{Intake, Job, Pool};

mod memory;
mod place;
#[cfg(test)]
mod tests;

pub use memory::MemoryDirectory;
use place::{Disk, Of, Place};

/// A directory for what survives a loss of power. As long as it or a keeper of it is there, nobody
/// else gets the same directory. Dropping it waits until everything that was handed in has been
/// written.
#[derive(Debug)]
pub struct StateDirectory {
    disk: Directory,
    writer: Pool,
    /// Files that are taken over, whatever disk they name, by the first keeper of each.
    adopted: Mutex<BTreeSet<String>>,
}

/// The reservations of one namespace.
struct Kept<D> {
    file: Place<D>,
    intake: Intake,
    found: Result<Option<Vec<u8>>, String>,
}

#[derive(Clone, Debug)]
struct Directory {
    path: PathBuf,
    files: OwnedDirectory,
    _lock: Arc<File>,
}

/// What the names of records begin with.
const PREFIX: &str = "reservations-";
/// How long whoever offers a namespace waits for what is kept of it.
const PATIENCE: Duration = Duration::from_secs(10);
/// Records that wait for the disk: one of each namespace at most, and of those that have gone.
const WAITING_MAX: usize = 1 << 16;

impl StateDirectory {
    /// Opens the directory at `path`, which is made if there is none.
    ///
    /// # Errors
    ///
    /// A line, if that cannot be, or another process has it.
    pub fn open(path: &Path) -> Result<Self, String> {
        let shown = path.display();
        let wrong = |error: io::Error| format!("open the state directory {shown}: {error}");
        let files = OwnedDirectory::open(path).map_err(wrong)?;
        let lock = files.lock_file("lock").map_err(wrong)?;
        lock.try_lock().map_err(|_| {
            format!("use the state directory {shown}: another process has it, expected none")
        })?;
        let disk = Directory { path: path.to_owned(), files, _lock: Arc::new(lock) };
        Ok(Self { disk, writer: Pool::new(1, WAITING_MAX), adopted: Mutex::default() })
    }

    /// Takes over these files, whatever disk they name, or none: each becomes, once, that of the disk
    /// that is served under its number.
    ///
    /// # Errors
    ///
    /// A line, if one of them does not exist.
    pub fn adopting(self, names: &[String]) -> Result<Self, String> {
        let place = self.disk.path.display();
        for name in names {
            let is_record =
                name.starts_with(PREFIX) && !name.contains('/') && !name.ends_with(".new");
            match self.disk.read(name) {
                Ok(Some(_)) if is_record => {}
                Err(error) if is_record => return Err(format!("adopt {place}/{name}: {error}")),
                _ => {
                    return Err(format!(
                        "adopt `{name}`: it is no record in {place}, expected the name of a file there \
                         that begins with {PREFIX}"
                    ));
                }
            }
        }
        Ok(Self { adopted: Mutex::new(names.iter().cloned().collect()), ..self })
    }

    /// Where the reservations of a namespace are kept, whose disk has this identity: a line of text that
    /// no other disk has, and this one after every restart. Waits for the state directory.
    #[must_use]
    pub fn keeper(&self, nqn: &str, nsid: u32, disk: &str) -> Box<dyn Keeper> {
        let name = name_of(nqn, nsid);
        let shown = self.disk.path.join(&name).display().to_string();
        let is_adopted = self.adopted.lock().unwrap_or_else(PoisonError::into_inner).remove(&name);
        let of = Of { nqn: nqn.to_owned(), nsid, disk: disk.replace(char::is_control, "?") };
        let file = Place { disk: self.disk.clone(), name, of, shown };
        Box::new(Kept::new(file, self.writer.intake(), is_adopted))
    }
}

/// A file's name, in which no character of a subsystem's name can do harm.
fn name_of(nqn: &str, nsid: u32) -> String {
    let hash = nqn.bytes().fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| {
        (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3)
    });
    format!("{PREFIX}{hash:016x}-{nsid}")
}

impl<D: Disk + Clone + 'static> Keeper for Kept<D> {
    fn load(&self) -> Result<Option<Vec<u8>>, String> {
        self.found.clone()
    }

    fn store(&mut self, record: Option<Vec<u8>>, stored: Stored) -> Result<(), Stored> {
        let (mut file, intake) = (self.file.clone(), self.intake.clone());
        // A job that nobody takes is dropped, and what it had to tell must not be.
        let stored = Arc::new(Mutex::new(Some(stored)));
        let theirs = Arc::clone(&stored);
        let job = Job::new("keep reservations", move || {
            let written = file.write(record.as_deref());
            if let Some(stored) = take(&theirs) {
                stored.ended(written);
            }
        });
        match intake.submit(job) {
            Ok(()) => Ok(()),
            Err(_) => take(&stored).map_or(Ok(()), Err),
        }
    }
}

fn take(stored: &Mutex<Option<Stored>>) -> Option<Stored> {
    stored.lock().unwrap_or_else(PoisonError::into_inner).take()
}

impl<D: Disk> Kept<D> {
    /// What is kept of a namespace, as it is when all that was handed in before has been written.
    fn new(file: Place<D>, intake: Intake, is_adopted: bool) -> Self
    where
        D: Clone + 'static,
    {
        let (tell, told) = channel();
        let mut reads = file.clone();
        // Whoever asks may wait. It is not told anything by a pool that takes no more.
        let job = Job::new("read reservations", move || {
            let adopted = if is_adopted { reads.adopt() } else { Ok(()) };
            let _ = tell.send(adopted.and_then(|()| reads.read()));
        });
        let wrong = format!("read {}: no thread to read it, expected one", file.shown);
        let asked = intake.submit(job);
        let found = match asked {
            Ok(()) => told.recv_timeout(PATIENCE).unwrap_or_else(|error| match error {
                RecvTimeoutError::Disconnected => Err(wrong),
                RecvTimeoutError::Timeout => Err(format!(
                    "read {}: the disk has not answered for {} s: it may be full of what was written \
                     before, or stand still",
                    file.shown,
                    PATIENCE.as_secs()
                )),
            }),
            Err(_) => Err(wrong),
        };
        Self { file, intake, found }
    }
}

impl Disk for Directory {
    fn read(&self, name: &str) -> io::Result<Option<Vec<u8>>> {
        self.files.read(name)
    }

    fn write(&mut self, name: &str, bytes: &[u8]) -> io::Result<()> {
        self.files.write(name, bytes)
    }

    fn sync(&mut self, name: &str) -> io::Result<()> {
        self.files.sync(name)
    }

    fn rename(&mut self, from: &str, to: &str) -> io::Result<()> {
        self.files.rename(from, to)
    }

    fn remove(&mut self, name: &str) -> io::Result<()> {
        self.files.remove(name)
    }

    fn sync_names(&mut self) -> io::Result<()> {
        self.files.sync_names()
    }
}

impl<D> fmt::Debug for Kept<D> {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.debug_struct("Kept").field("name", &self.file.name).finish_non_exhaustive()
    }
}
