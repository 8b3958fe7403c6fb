//! The engine without `io_uring`: a few threads that make plain system calls.
//!
//! The locks here are held for a few instructions, except a slot's own, which its worker holds while
//! the kernel works; nobody else wants it then.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use dma::Regions;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;

use crate::engine::{Capacity, Ended, Job, Refused};
use crate::file::File;
use crate::thread::Thread;
use crate::vectored::{Direction, Vectors};

/// Threads and the table of jobs they work on.
#[derive(Debug)]
pub(crate) struct Workers {
    shared: Arc<Shared>,
    free: Vec<u16>,
    depth: usize,
    /// Whether jobs were queued since the workers were last woken.
    unannounced: bool,
    _threads: Vec<Thread<()>>,
}

#[derive(Debug)]
struct Shared {
    file: Arc<File>,
    /// See [`File::to_sync`].
    to_sync: OwnedFd,
    slots: Box<[Mutex<Slot>]>,
    queue: Mutex<Queue>,
    queued: Condvar,
    ended: Mutex<Outbox>,
    /// Written when somebody who awaits it is to look into the outbox.
    event: OwnedFd,
}

#[derive(Debug)]
struct Outbox {
    jobs: Vec<(u16, Ended)>,
    is_awaited: bool,
}

#[derive(Debug)]
struct Queue {
    jobs: VecDeque<u16>,
    stop: bool,
}

#[derive(Debug)]
struct Slot {
    token: u64,
    offset: u64,
    verb: Verb,
    vectors: Vectors,
}

#[derive(Clone, Copy, Debug)]
enum Verb {
    Read,
    Write { stable: bool },
    Sync,
    PunchHole { len_bytes: u64 },
    ZeroRange { len_bytes: u64 },
}

/// As many as keep a disk of one queue busy; each is mostly asleep in the kernel.
const WORKERS: usize = 4;

impl Workers {
    pub(crate) fn new(
        file: Arc<File>,
        regions: &Regions,
        capacity: Capacity,
    ) -> std::io::Result<Self> {
        let Capacity { depth, segments_max } = capacity;
        let slot = || {
            let vectors = Vectors::with_capacity(regions.clone(), usize::from(segments_max));
            Mutex::new(Slot { token: 0, offset: 0, verb: Verb::Sync, vectors })
        };
        let room = usize::from(depth);
        let to_sync = file.to_sync()?;
        let shared = Arc::new(Shared {
            file,
            to_sync,
            slots: (0..depth).map(|_| slot()).collect(),
            queue: Mutex::new(Queue { jobs: VecDeque::with_capacity(room), stop: false }),
            queued: Condvar::new(),
            ended: Mutex::new(Outbox { jobs: Vec::with_capacity(room), is_awaited: false }),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mut workers = Self {
            shared,
            free: (0..depth).rev().collect(),
            depth: room,
            unannounced: false,
            _threads: Vec::with_capacity(WORKERS),
        };
        for number in 0..WORKERS.min(room) {
            let shared = Arc::clone(&workers.shared);
            // If this fails, dropping `workers` ends those that have been started.
            let thread = Thread::spawn(&format!("file-{number}"), None, move |_| shared.work())?;
            workers._threads.push(thread);
        }
        Ok(workers)
    }

    pub(crate) fn submit(&mut self, token: u64, job: Job<'_>) -> Result<(), Refused> {
        let index = *self.free.last().ok_or(Refused::Full)?;
        lock(&self.shared.slots[usize::from(index)]).set(token, job)?;
        self.free.pop();
        lock(&self.shared.queue).jobs.push_back(index);
        self.unannounced = true;
        Ok(())
    }

    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.unannounced) {
            self.shared.queued.notify_all();
        }
    }

    pub(crate) fn poll(&mut self, ended: &mut Vec<Ended>) {
        self.flush();
        for (index, job) in lock(&self.shared.ended).jobs.drain(..) {
            self.free.push(index);
            ended.push(job);
        }
    }

    /// Becomes readable when something has ended since [`arm`](Self::arm).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Starts everything, asks for a sign of the next job that ends, and says whether one has.
    pub(crate) fn arm(&mut self) -> bool {
        self.flush();
        // Empties it, or finds it empty: an old sign is of no use to anybody.
        let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        let mut ended = lock(&self.shared.ended);
        ended.is_awaited = ended.jobs.is_empty();
        !ended.is_awaited
    }

    /// Asks for no sign.
    pub(crate) fn disarm(&mut self) {
        lock(&self.shared.ended).is_awaited = false;
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.depth - self.free.len()
    }
}

impl Drop for Workers {
    /// Lets the workers finish the queue and end; the threads' own drop waits for that.
    fn drop(&mut self) {
        lock(&self.shared.queue).stop = true;
        self.shared.queued.notify_all();
    }
}

impl Shared {
    /// What a worker does until there is nothing left to do and never will be.
    fn work(&self) {
        while let Some(index) = self.next() {
            let (token, result) = {
                let mut slot = lock(&self.slots[usize::from(index)]);
                (slot.token, slot.run(&self.file, &self.to_sync))
            };
            let is_awaited = {
                let mut ended = lock(&self.ended);
                ended.jobs.push((index, Ended { token, result }));
                std::mem::take(&mut ended.is_awaited)
            };
            if is_awaited {
                // Refused only if the count would overflow, and then it is readable already.
                let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
        }
    }

    fn next(&self) -> Option<u16> {
        let mut queue = lock(&self.queue);
        loop {
            match queue.jobs.pop_front() {
                Some(index) => return Some(index),
                None if queue.stop => return None,
                None => {
                    queue = self.queued.wait(queue).unwrap_or_else(PoisonError::into_inner);
                }
            }
        }
    }
}

impl Slot {
    fn set(&mut self, token: u64, job: Job<'_>) -> Result<(), Refused> {
        let (verb, offset, segments) = match job {
            Job::Read { offset, into } => (Verb::Read, offset, into),
            Job::Write { offset, from, stable } => (Verb::Write { stable }, offset, from),
            Job::Sync => (Verb::Sync, 0, [].as_slice()),
            Job::PunchHole { offset, len_bytes } => {
                (Verb::PunchHole { len_bytes }, offset, [].as_slice())
            }
            Job::ZeroRange { offset, len_bytes } => {
                (Verb::ZeroRange { len_bytes }, offset, [].as_slice())
            }
        };
        if !self.vectors.set(segments).map_err(Refused::NoSuchMemory)? {
            return Err(Refused::TooManySegments);
        }
        (self.token, self.offset, self.verb) = (token, offset, verb);
        Ok(())
    }

    fn run(&mut self, file: &File, to_sync: &OwnedFd) -> Result<(), Errno> {
        let offset = self.offset;
        let keep = FallocateFlags::KEEP_SIZE;
        match self.verb {
            Verb::Read => self.vectors.transfer(file, offset, Direction::FromFile),
            Verb::Write { stable: false } => self.vectors.transfer(file, offset, Direction::ToFile),
            Verb::Write { stable: true } => {
                self.vectors.transfer(file, offset, Direction::ToFile)?;
                fdatasync(file)
            }
            Verb::Sync => fdatasync(to_sync),
            Verb::PunchHole { len_bytes } => {
                fallocate(file, FallocateFlags::PUNCH_HOLE | keep, offset, len_bytes)
            }
            Verb::ZeroRange { len_bytes } => {
                fallocate(file, FallocateFlags::ZERO_RANGE | keep, offset, len_bytes)
            }
        }
    }
}

/// A worker that panicked has poisoned its lock and will be reported by its join; the table itself
/// is whole after every statement.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use dma::Regions;
    use rustix::io::Errno;

    use super::{Slot, Verb};
    use crate::file::{File, FileOptions};
    use crate::vectored::Vectors;

    #[test]
    fn a_sync_is_of_a_description_that_transfers_do_not_use() {
        let directory = tempfile::tempdir().unwrap();
        let (path, unit_bytes) = (directory.path().join("blocks"), 4096);
        let len_bytes = Some(8192);
        let options = FileOptions { path, len_bytes, unit_bytes, direct: false, read_only: false };
        let file = File::open(&options).unwrap();
        let vectors = Vectors::with_capacity(Regions::new(1), 1);
        let mut slot = Slot { token: 0, offset: 0, verb: Verb::Sync, vectors };
        assert_eq!(slot.run(&file, &file.to_sync().unwrap()), Ok(()));
        // A pipe cannot be synced (fsync(2)).
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(slot.run(&file, &pipe), Err(Errno::INVAL));
    }
}
