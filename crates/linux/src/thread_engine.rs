//! File I/O engine without `io_uring`: a few threads that make blocking system calls.
//!
//! The locks are held for a few instructions, except the lock of a slot, which its worker holds
//! during the system call, while no other thread needs it.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{FallocateFlags, fallocate, fdatasync};
use rustix::io::Errno;
use tenmil_dma::RegionTable;

use crate::file_engine::{EngineLimits, FileOp, JobCompletion, SubmitError};
use crate::io_vectors::{IoVectors, TransferDirection};
use crate::named_thread::NamedThread;
use crate::storage_file::StorageFile;

/// Worker threads and the table of their jobs.
#[derive(Debug)]
pub(crate) struct ThreadEngine {
    shared: Arc<EngineShared>,
    free: Vec<u16>,
    depth: usize,
    /// Whether jobs were queued since the workers were last woken.
    has_unnotified: bool,
    _threads: Vec<NamedThread<()>>,
}

#[derive(Debug)]
struct EngineShared {
    file: Arc<StorageFile>,
    /// See [`StorageFile::open_sync_descriptor`].
    to_sync: OwnedFd,
    slots: Box<[Mutex<JobSlot>]>,
    queue: Mutex<PendingJobs>,
    queued: Condvar,
    ended: Mutex<CompletedJobs>,
    /// Written when a job completes while a waiter has armed the engine.
    event: OwnedFd,
}

#[derive(Debug)]
struct CompletedJobs {
    jobs: Vec<(u16, JobCompletion)>,
    is_armed: bool,
}

#[derive(Debug)]
struct PendingJobs {
    jobs: VecDeque<u16>,
    stop: bool,
}

#[derive(Debug)]
struct JobSlot {
    token: u64,
    offset: u64,
    verb: Opcode,
    vectors: IoVectors,
}

#[derive(Clone, Copy, Debug)]
enum Opcode {
    Read,
    Write { stable: bool },
    Sync,
    PunchHole { len_bytes: u64 },
    ZeroRange { len_bytes: u64 },
}

/// Enough to keep a single-queue disk busy; each thread mostly sleeps in the kernel.
const WORKERS: usize = 4;

impl ThreadEngine {
    pub(crate) fn new(
        file: Arc<StorageFile>,
        regions: &RegionTable,
        capacity: EngineLimits,
    ) -> std::io::Result<Self> {
        let EngineLimits { depth, segments_max } = capacity;
        let slot = || {
            let vectors = IoVectors::with_capacity(regions.clone(), usize::from(segments_max));
            Mutex::new(JobSlot { token: 0, offset: 0, verb: Opcode::Sync, vectors })
        };
        let room = usize::from(depth);
        let to_sync = file.open_sync_descriptor()?;
        let shared = Arc::new(EngineShared {
            file,
            to_sync,
            slots: (0..depth).map(|_| slot()).collect(),
            queue: Mutex::new(PendingJobs { jobs: VecDeque::with_capacity(room), stop: false }),
            queued: Condvar::new(),
            ended: Mutex::new(CompletedJobs { jobs: Vec::with_capacity(room), is_armed: false }),
            event: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
        });
        let mut workers = Self {
            shared,
            free: (0..depth).rev().collect(),
            depth: room,
            has_unnotified: false,
            _threads: Vec::with_capacity(WORKERS),
        };
        for number in 0..WORKERS.min(room) {
            let shared = Arc::clone(&workers.shared);
            // If this fails, dropping `workers` ends the threads already started.
            let thread =
                NamedThread::spawn(&format!("file-{number}"), None, move |_| shared.run_worker())?;
            workers._threads.push(thread);
        }
        Ok(workers)
    }

    pub(crate) fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        let index = *self.free.last().ok_or(SubmitError::Full)?;
        lock_ignoring_poison(&self.shared.slots[usize::from(index)]).set_job(token, job)?;
        self.free.pop();
        lock_ignoring_poison(&self.shared.queue).jobs.push_back(index);
        self.has_unnotified = true;
        Ok(())
    }

    pub(crate) fn flush(&mut self) {
        if std::mem::take(&mut self.has_unnotified) {
            self.shared.queued.notify_all();
        }
    }

    pub(crate) fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        self.flush();
        for (index, job) in lock_ignoring_poison(&self.shared.ended).jobs.drain(..) {
            self.free.push(index);
            ended.push(job);
        }
    }

    /// Descriptor that becomes readable when a job completes after [`arm`](Self::arm).
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.shared.event.as_fd()
    }

    /// Starts all jobs, requests a wake-up for the next completion, and returns whether one is
    /// pending.
    pub(crate) fn arm(&mut self) -> bool {
        self.flush();
        // Clears an earlier wake-up, if any.
        let _ = rustix::io::read(&self.shared.event, &mut [0; 8]);
        // Check and request are made under one lock, so a completion in between is not missed.
        let mut ended = lock_ignoring_poison(&self.shared.ended);
        ended.is_armed = ended.jobs.is_empty();
        !ended.is_armed
    }

    /// Cancels the request for a wake-up.
    pub(crate) fn disarm(&mut self) {
        lock_ignoring_poison(&self.shared.ended).is_armed = false;
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.depth - self.free.len()
    }
}

impl Drop for ThreadEngine {
    /// Lets the workers finish the queue and exit; dropping the threads joins them.
    fn drop(&mut self) {
        lock_ignoring_poison(&self.shared.queue).stop = true;
        self.shared.queued.notify_all();
    }
}

impl EngineShared {
    /// Loop of a worker: runs until the queue is empty and the engine is closed.
    fn run_worker(&self) {
        while let Some(index) = self.next_job() {
            let (token, result) = {
                let mut slot = lock_ignoring_poison(&self.slots[usize::from(index)]);
                (slot.token, slot.run_job(&self.file, &self.to_sync))
            };
            let is_awaited = {
                let mut ended = lock_ignoring_poison(&self.ended);
                ended.jobs.push((index, JobCompletion { token, result }));
                std::mem::take(&mut ended.is_armed)
            };
            if is_awaited {
                // Fails only if the count would overflow; then the eventfd is readable already.
                let _ = rustix::io::write(&self.event, &1_u64.to_ne_bytes());
            }
        }
    }

    fn next_job(&self) -> Option<u16> {
        let mut queue = lock_ignoring_poison(&self.queue);
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

impl JobSlot {
    fn set_job(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        let (verb, offset, segments) = match job {
            FileOp::Read { offset, into } => (Opcode::Read, offset, into),
            FileOp::Write { offset, from, fua: stable } => (Opcode::Write { stable }, offset, from),
            FileOp::Sync => (Opcode::Sync, 0, [].as_slice()),
            FileOp::PunchHole { offset, len_bytes } => {
                (Opcode::PunchHole { len_bytes }, offset, [].as_slice())
            }
            FileOp::ZeroRange { offset, len_bytes } => {
                (Opcode::ZeroRange { len_bytes }, offset, [].as_slice())
            }
        };
        if !self.vectors.set_all(segments).map_err(SubmitError::InvalidSegment)? {
            return Err(SubmitError::TooManySegments);
        }
        (self.token, self.offset, self.verb) = (token, offset, verb);
        Ok(())
    }

    fn run_job(&mut self, file: impl AsFd, to_sync: &OwnedFd) -> Result<(), Errno> {
        let offset = self.offset;
        let keep = FallocateFlags::KEEP_SIZE;
        match self.verb {
            Opcode::Read => self.vectors.transfer_all(&file, offset, TransferDirection::FromFile),
            Opcode::Write { stable: false } => {
                self.vectors.transfer_all(&file, offset, TransferDirection::ToFile)
            }
            Opcode::Write { stable: true } => {
                self.vectors.transfer_all(&file, offset, TransferDirection::ToFile)?;
                fdatasync(file)
            }
            Opcode::Sync => fdatasync(to_sync),
            Opcode::PunchHole { len_bytes } => {
                fallocate(file, FallocateFlags::PUNCH_HOLE | keep, offset, len_bytes)
            }
            Opcode::ZeroRange { len_bytes } => {
                fallocate(file, FallocateFlags::ZERO_RANGE | keep, offset, len_bytes)
            }
        }
    }
}

/// Locks a mutex, ignoring poison: the panic of a worker is reported by its join, and the table is
/// consistent after every statement.
fn lock_ignoring_poison<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use rustix::io::Errno;
    use tenmil_dma::RegionTable;

    use super::{JobSlot, Opcode};
    use crate::io_vectors::IoVectors;
    use crate::storage_file::{FileOptions, StorageFile};

    #[test]
    fn sync_uses_a_separate_file_description() {
        let directory = tempfile::tempdir().unwrap();
        let (path, unit_bytes) = (directory.path().join("blocks"), 4096);
        let len_bytes = Some(8192);
        let options = FileOptions { path, len_bytes, unit_bytes, direct: false, read_only: false };
        let file = StorageFile::open(&options).unwrap();
        let vectors = IoVectors::with_capacity(RegionTable::new(1), 1);
        let mut slot = JobSlot { token: 0, offset: 0, verb: Opcode::Sync, vectors };
        assert_eq!(slot.run_job(&file, &file.open_sync_descriptor().unwrap()), Ok(()));
        // A pipe cannot be synced (fsync(2)).
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        assert_eq!(slot.run_job(&file, &pipe), Err(Errno::INVAL));
    }

    #[test]
    fn fua_write_is_synced_before_completion_and_others_are_not() {
        let vectors = IoVectors::with_capacity(RegionTable::new(1), 1);
        let (pipe, other) = rustix::pipe::pipe().unwrap();
        let mut slot = JobSlot { token: 0, offset: 0, verb: Opcode::Sync, vectors };
        for (stable, expected) in [(false, Ok(())), (true, Err(Errno::INVAL))] {
            slot.verb = Opcode::Write { stable };
            // A write of no bytes to what cannot be synced (fsync(2)).
            assert_eq!(slot.run_job(&pipe, &other), expected);
        }
    }
}
