//! The `io_uring` engine: a ring, registered files, and few system calls per iteration.
//!
//! A small batch takes one system call; a larger one is submitted in pieces, so that the device
//! works on the first pieces while the rest is being prepared.
//!
//! The engines of channels that are used together share a ring, and a system call submits the jobs of
//! all: see `ring.rs`.
//!
//! No kernel thread polls the ring (SQPOLL would take a CPU away from the driver), and the ring is
//! not tied to the thread that created it, so it may move with its channel. The kernel receives
//! addresses of region memory only. A slot keeps their list unchanged until the kernel has
//! completed the job, and dropping the engine waits for that.
//!
//! Kernel-owned memory has no address in this process (`kernel_buffer_jobs`); such a job uses three
//! linked entries.

mod kernel_buffer_jobs;
mod ring;
#[cfg(test)]
mod shared_ring_tests;

use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::sync::Arc;

use io_uring::{IoUring, opcode, squeue, types};
use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::io::Errno;
use tenmil_dma::RegionTable;

use crate::file_engine::{EngineLimits, FileOp, JobCompletion, SubmitError};
use crate::io_vectors::IoVectors;
use crate::storage_file::StorageFile;

pub(crate) use self::kernel_buffer_jobs::buffer_entry;
use self::kernel_buffer_jobs::{KernelBufferJob, LinkedStep};
use self::ring::{EngineTag, Ring, RingHandle};

/// Engine of a file: its table of jobs, and its place in a ring.
pub(crate) struct FileRing {
    ring: RingHandle,
    tag: EngineTag,
    jobs: JobTable,
    /// Keeps the descriptor open while the ring may use it.
    _file: Arc<StorageFile>,
}

/// Jobs of an engine.
struct JobTable {
    /// Jobs by the `user_data` of their entries.
    slots: Box<[JobSlot]>,
    free: Vec<u16>,
    /// Jobs that completed partially or could not be pushed, and are resubmitted.
    to_resubmit: Vec<u16>,
}

/// Job in flight.
struct JobSlot {
    token: u64,
    offset: u64,
    kind: JobKind,
    vectors: IoVectors,
    /// Kernel-owned buffer that replaces memory segments.
    kernel_buffer: Option<KernelBufferJob>,
}

#[derive(Clone, Copy)]
enum JobKind {
    Read,
    Write { stable: bool },
    Sync,
    Allocate { mode: i32, len_bytes: u64 },
}

/// Registered file of an engine: the open file description that holds the lock. It stays open until
/// the kernel has completed the last job.
const FILE: u16 = 0;
/// The same file through a separate description: see [`StorageFile::open_sync_descriptor`].
const TO_SYNC: u16 = 1;
/// Longest wait of an engine that is dropped, before it looks again: the engine of another thread
/// may have found its completions.
const DROP_WAIT: Timespec = Timespec { tv_sec: 0, tv_nsec: 10_000_000 };
const PUNCH_HOLE: i32 = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
const ZERO_RANGE: i32 = libc::FALLOC_FL_ZERO_RANGE | libc::FALLOC_FL_KEEP_SIZE;

/// Whether the kernel permits this process to use io_uring.
pub(crate) fn check_io_uring() -> Result<(), Errno> {
    IoUring::new(2).map(drop).map_err(|error| errno_of(&error))
}

impl FileRing {
    /// Creates an engine for `file`, or returns the kernel's error.
    pub(crate) fn new(
        file: Arc<StorageFile>,
        regions: &RegionTable,
        capacity: EngineLimits,
    ) -> Result<Self, Errno> {
        let EngineLimits { depth, segments_max } = capacity;
        let to_sync = file.open_sync_descriptor()?;
        let files = [file.as_fd().as_raw_fd(), to_sync.as_raw_fd()];
        let (ring, tag) = RingHandle::open(depth, files)?;
        let slot = || JobSlot {
            token: 0,
            offset: 0,
            kind: JobKind::Sync,
            vectors: IoVectors::with_capacity(regions.clone(), usize::from(segments_max)),
            kernel_buffer: None,
        };
        let jobs = JobTable {
            slots: (0..depth).map(|_| slot()).collect(),
            free: (0..depth).rev().collect(),
            to_resubmit: Vec::with_capacity(usize::from(depth)),
        };
        Ok(Self { ring, tag, jobs, _file: file })
    }

    pub(crate) fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        let Self { ring, tag, jobs, .. } = self;
        let index = *jobs.free.last().ok_or(SubmitError::Full)?;
        let slot = &mut jobs.slots[usize::from(index)];
        let (verb, offset, segments) = match job {
            FileOp::Read { offset, into } => (JobKind::Read, offset, into),
            FileOp::Write { offset, from, fua: stable } => {
                (JobKind::Write { stable }, offset, from)
            }
            FileOp::Sync => (JobKind::Sync, 0, [].as_slice()),
            FileOp::PunchHole { offset, len_bytes } => {
                (JobKind::Allocate { mode: PUNCH_HOLE, len_bytes }, offset, [].as_slice())
            }
            FileOp::ZeroRange { offset, len_bytes } => {
                (JobKind::Allocate { mode: ZERO_RANGE, len_bytes }, offset, [].as_slice())
            }
        };
        (slot.token, slot.offset, slot.kind) = (token, offset, verb);
        match slot.vectors.set_all(segments) {
            Ok(true) => {
                jobs.free.pop();
                ring.access(|ring| {
                    ring.begin_job();
                    jobs.push_entry(ring, *tag, index);
                });
                Ok(())
            }
            Ok(false) => Err(SubmitError::TooManySegments),
            Err(missing) => self.submit_kernel_buffer(index, segments, missing),
        }
    }

    pub(crate) fn flush(&mut self) {
        self.ring.access(Ring::flush);
    }

    pub(crate) fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        let Self { ring, tag, jobs, .. } = self;
        ring.access(|ring| {
            let before = jobs.free.len();
            ring.reap(*tag, |place, result| jobs.handle_completion(place, result, ended));
            ring.end_jobs(jobs.free.len() - before);
            jobs.resubmit(ring, *tag);
            ring.flush();
        });
    }

    /// Descriptor that becomes readable when a job completes, of this engine or of one that shares
    /// its ring.
    pub(crate) fn descriptor(&self) -> BorrowedFd<'_> {
        self.ring.descriptor()
    }

    /// Submits everything and checks for completions. True if a job may have completed or could not
    /// be started.
    pub(crate) fn arm(&mut self) -> bool {
        let Self { ring, tag, jobs, .. } = self;
        ring.access(|ring| ring.arm(*tag)) || !jobs.to_resubmit.is_empty()
    }

    pub(crate) fn disarm(&mut self) {
        let Self { ring, tag, .. } = self;
        ring.access(|ring| ring.disarm(*tag));
    }

    /// Whether entries have not been submitted yet.
    pub(crate) fn has_unsubmitted(&self) -> bool {
        !self.jobs.to_resubmit.is_empty() || self.ring.inspect(Ring::has_unsubmitted)
    }

    pub(crate) fn in_flight(&self) -> usize {
        self.jobs.in_flight()
    }

    /// Takes what has completed, whatever other engines wait for. Fails if the kernel will never
    /// accept the rest.
    fn poll_for_drop(&mut self, ended: &mut Vec<JobCompletion>) -> Result<(), Errno> {
        let Self { ring, tag, jobs, .. } = self;
        ring.access(|ring| {
            let flushed = ring.try_flush();
            let before = jobs.free.len();
            ring.reap_all(*tag, &mut |place, result| jobs.handle_completion(place, result, ended));
            ring.end_jobs(jobs.free.len() - before);
            jobs.resubmit(ring, *tag);
            flushed
        })
    }
}

impl JobTable {
    fn in_flight(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Handles the completion of an entry.
    #[inline]
    fn handle_completion(&mut self, place: u32, answer: i32, ended: &mut Vec<JobCompletion>) {
        // A plain number is a slot index; larger values are slot and step of a kernel-buffer job.
        let (index, result_of) = match u16::try_from(place) {
            Ok(index) => (index, self.slots[usize::from(index)].handle_cqe_result(answer)),
            Err(_) => {
                let Some((index, step)) = LinkedStep::from_user_data(place) else { return };
                let slot = &mut self.slots[usize::from(index)];
                let Some(result_of) = slot.handle_linked_step(step, answer) else { return };
                (index, result_of)
            }
        };
        match result_of {
            Some(result) => {
                ended.push(JobCompletion { token: self.slots[usize::from(index)].token, result });
                self.free.push(index);
            }
            None => self.to_resubmit.push(index),
        }
    }

    #[inline]
    fn resubmit(&mut self, ring: &mut Ring, tag: EngineTag) {
        for _ in 0..self.to_resubmit.len() {
            let Some(index) = self.to_resubmit.pop() else { return };
            if self.slots[usize::from(index)].kernel_buffer.is_none() {
                self.push_entry(ring, tag, index);
            } else if !self.push_kernel_buffer(ring, tag, index) {
                // The ring is full; retried in the next iteration.
                self.to_resubmit.insert(0, index);
            }
        }
    }

    #[inline]
    fn push_entry(&mut self, ring: &mut Ring, tag: EngineTag, index: u16) {
        let entry = self.slots[usize::from(index)].remaining_entry(tag);
        let entry = entry.user_data(tag.user_data(u32::from(index)));
        // SAFETY: the entry names the registered file, which `_file` keeps open, and the slot's
        // address list. The list is a heap allocation of fixed capacity that changes only while the
        // slot is free or its job has completed, which is known only from the kernel's completion.
        // The memory behind it is region memory, kept mapped by the `RegionTable` in the same slot.
        // Dropping the engine waits until no slot is in flight.
        let is_pushed = unsafe { ring.push(&[entry]) };
        if !is_pushed {
            // The kernel accepts nothing at the moment; retried in the next iteration.
            self.to_resubmit.insert(0, index);
        }
    }
}

impl JobSlot {
    /// Entry for the remaining part of the job.
    fn remaining_entry(&self, tag: EngineTag) -> squeue::Entry {
        let list = self.vectors.remaining();
        let count = u32::try_from(list.len()).unwrap_or(0);
        let file = tag.file(FILE);
        match self.kind {
            JobKind::Read => {
                if let Some((address, len_bytes)) = single_segment(list) {
                    let read = opcode::Read::new(file, address, len_bytes);
                    return read.offset(self.offset).build();
                }
                opcode::Readv::new(file, list.as_ptr(), count).offset(self.offset).build()
            }
            JobKind::Write { stable } => {
                let flags = if stable { libc::RWF_DSYNC } else { 0 };
                if let Some((address, len_bytes)) = single_segment(list) {
                    let write = opcode::Write::new(file, address, len_bytes);
                    return write.offset(self.offset).rw_flags(flags).build();
                }
                let write = opcode::Writev::new(file, list.as_ptr(), count);
                write.offset(self.offset).rw_flags(flags).build()
            }
            JobKind::Sync => {
                let sync = opcode::Fsync::new(tag.file(TO_SYNC));
                sync.flags(types::FsyncFlags::DATASYNC).build()
            }
            JobKind::Allocate { mode, len_bytes } => {
                opcode::Fallocate::new(file, len_bytes).offset(self.offset).mode(mode).build()
            }
        }
    }

    /// Result of the job after a completion; `None` if part of it remains.
    fn handle_cqe_result(&mut self, answer: i32) -> Option<Result<(), Errno>> {
        let Ok(count) = u32::try_from(answer) else {
            let errno = Errno::from_raw_os_error(-answer);
            // EINTR and EAGAIN are temporary: the job is resubmitted.
            return (!matches!(errno, Errno::INTR | Errno::AGAIN)).then_some(Err(errno));
        };
        match self.kind {
            JobKind::Sync | JobKind::Allocate { .. } => Some(Ok(())),
            // No progress and no error: the file ends here, though it was longer when it was
            // opened.
            JobKind::Read | JobKind::Write { .. } if count == 0 => Some(Err(Errno::IO)),
            JobKind::Read | JobKind::Write { .. } => {
                self.offset += u64::from(count);
                (!self.vectors.advance_list(count as usize)).then_some(Ok(()))
            }
        }
    }
}

impl Drop for FileRing {
    fn drop(&mut self) {
        let mut ended = Vec::with_capacity(self.jobs.slots.len());
        while self.in_flight() > 0 {
            let flushed = self.poll_for_drop(&mut ended);
            ended.clear();
            if self.in_flight() == 0 {
                break;
            }
            if flushed.is_err() {
                // The kernel's completion will never be seen, so the memory it may access is
                // leaked: the lists stay allocated and their regions stay mapped.
                std::mem::forget(std::mem::take(&mut self.jobs.slots));
                self.jobs.free.clear();
                break;
            }
            let descriptor = self.descriptor();
            let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
            // A signal or an error ends the wait early, which is harmless.
            let _ = rustix::event::poll(&mut entries, Some(&DROP_WAIT));
        }
        let Self { ring, tag, .. } = self;
        ring.access(|ring| ring.remove_member(*tag));
    }
}

impl std::fmt::Debug for FileRing {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("FileRing").field("in_flight", &self.in_flight()).finish_non_exhaustive()
    }
}

/// The only segment of a list, if there is just one: the kernel then need not read the list.
fn single_segment(list: &[libc::iovec]) -> Option<(*mut u8, u32)> {
    let [only] = list else { return None };
    Some((only.iov_base.cast(), u32::try_from(only.iov_len).ok()?))
}

fn errno_of(error: &std::io::Error) -> Errno {
    Errno::from_io_error(error).unwrap_or(Errno::IO)
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsRawFd;
    use std::sync::Arc;

    use rustix::io::Errno;
    use tenmil_base::Segment;
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

    use super::ring::{EngineTag, Ring};
    use super::{FileRing, JobKind, JobSlot};
    use crate::file_engine::{EngineLimits, FileOp};
    use crate::io_vectors::IoVectors;
    use crate::storage_file::{FileOptions, StorageFile};

    fn test_slot(verb: JobKind) -> JobSlot {
        test_slot_of(verb, 1)
    }

    /// A slot for 8192 bytes of memory in `pieces` segments.
    fn test_slot_of(verb: JobKind, pieces: u32) -> JobSlot {
        let regions = RegionTable::new(1);
        let whole = regions
            .add_mapping(MemoryMapping::new(1 << 16, MemoryBacking::Private).unwrap())
            .unwrap();
        let mut vectors = IoVectors::with_capacity(regions, pieces as usize);
        let len_bytes = 8192 / pieces;
        let apart = |piece| whole.slice(piece * 2 * len_bytes, len_bytes).unwrap();
        let segments: Vec<Segment> = (0..pieces).map(apart).collect();
        vectors.set_all(&segments).unwrap();
        JobSlot { token: 0, offset: 1 << 20, kind: verb, vectors, kernel_buffer: None }
    }

    #[test]
    fn partial_transfer_continues() {
        let mut slot = test_slot(JobKind::Read);
        assert_eq!(slot.handle_cqe_result(4096), None);
        assert_eq!((slot.offset, slot.vectors.remaining()[0].iov_len), ((1 << 20) + 4096, 4096));
        assert_eq!(slot.handle_cqe_result(4096), Some(Ok(())));
    }

    #[test]
    fn interrupted_job_is_resubmitted_and_a_failed_one_is_not() {
        let mut slot = test_slot(JobKind::Write { stable: true });
        assert_eq!(slot.handle_cqe_result(-libc::EINTR), None);
        assert_eq!(slot.handle_cqe_result(-libc::EAGAIN), None);
        assert_eq!(slot.handle_cqe_result(-libc::ENOSPC), Some(Err(Errno::NOSPC)));
        assert_eq!(slot.handle_cqe_result(0), Some(Err(Errno::IO)), "no progress is no success");
    }

    /// Opcode and flags of an entry (io_uring.h: `struct io_uring_sqe`, bytes 0 and 28).
    fn entry_flags(slot: &JobSlot) -> (u8, u32) {
        let entry = slot.remaining_entry(EngineTag::default());
        assert_eq!(size_of_val(&entry), 64);
        let at = (&raw const entry).cast::<u8>();
        // SAFETY: `at` points to `entry`, which is 64 bytes long and alive.
        let opcode = unsafe { at.read() };
        let flags_at = at.wrapping_add(28).cast::<[u8; 4]>();
        // SAFETY: the same; bytes 28 to 31 lie within, and need no alignment.
        let flags = unsafe { flags_at.read() };
        (opcode, u32::from_ne_bytes(flags))
    }

    #[test]
    fn fua_write_uses_dsync() {
        let (writev, fsync, write) = (2, 3, 23);
        for (pieces, opcode) in [(1, write), (2, writev)] {
            let asked = |stable| entry_flags(&test_slot_of(JobKind::Write { stable }, pieces));
            assert_eq!(asked(true), (opcode, 2), "RWF_DSYNC");
            assert_eq!(asked(false), (opcode, 0));
        }
        assert_eq!(entry_flags(&test_slot(JobKind::Sync)), (fsync, 1), "IORING_FSYNC_DATASYNC");
    }

    #[test]
    fn batch_size_grows_with_the_queue() {
        let directory = tempfile::tempdir().unwrap();
        let options = FileOptions {
            path: directory.path().join("blocks"),
            len_bytes: Some(1 << 20),
            unit_bytes: 4096,
            direct: false,
            read_only: false,
        };
        let file = Arc::new(StorageFile::open(&options).unwrap());
        let regions = RegionTable::new(1);
        let whole =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let capacity = EngineLimits { depth: 64, segments_max: 1 };
        let Ok(mut ring) = FileRing::new(file, &regions, capacity) else {
            println!("skipped: io_uring is not allowed here");
            return;
        };
        let told_at = (1..=50).filter(|count| {
            ring.submit(*count, FileOp::Read { offset: 0, into: &[whole] }).unwrap();
            !ring.has_unsubmitted()
        });
        assert_eq!(told_at.collect::<Vec<u64>>(), [2, 4, 8, 16, 32, 48]);
    }

    #[test]
    fn sync_uses_a_separate_file_description() {
        let directory = tempfile::tempdir().unwrap();
        let (path, unit_bytes) = (directory.path().join("blocks"), 4096);
        let len_bytes = Some(1 << 20);
        let options = FileOptions { path, len_bytes, unit_bytes, direct: false, read_only: false };
        let file = Arc::new(StorageFile::open(&options).unwrap());
        let regions = RegionTable::new(1);
        let memory =
            regions.add_mapping(MemoryMapping::new(4096, MemoryBacking::Private).unwrap()).unwrap();
        let Ok(mut ring) =
            FileRing::new(file, &regions, EngineLimits { depth: 4, segments_max: 1 })
        else {
            println!("skipped: io_uring is not allowed here");
            return;
        };
        let run = |ring: &mut FileRing, job| {
            ring.submit(7, job).unwrap();
            ring.flush();
            let mut ended = Vec::new();
            while ended.is_empty() {
                ring.poll(&mut ended);
            }
            ended[0].result
        };
        assert_eq!(run(&mut ring, FileOp::Sync), Ok(()));
        // A pipe cannot be synced (fsync(2)), nor read at an offset.
        let (pipe, _other) = rustix::pipe::pipe().unwrap();
        let put = |ring: &FileRing, place| {
            let pipe = [pipe.as_raw_fd()];
            ring.ring.inspect(|ring: &Ring| {
                ring.uring.submitter().register_files_update(place, &pipe).unwrap();
            });
        };
        put(&ring, 1);
        assert_eq!(run(&mut ring, FileOp::Sync), Err(Errno::INVAL));
        assert_eq!(run(&mut ring, FileOp::Read { offset: 0, into: &[memory] }), Ok(()));
    }

    #[test]
    fn sync_result_of_zero_is_success() {
        assert_eq!(test_slot(JobKind::Sync).handle_cqe_result(0), Some(Ok(())));
        assert_eq!(
            test_slot(JobKind::Allocate { mode: 0, len_bytes: 1 }).handle_cqe_result(0),
            Some(Ok(()))
        );
    }
}
