//! Asynchronous reads and writes of a file.
//!
//! Two engines share one interface: `io_uring`, and a few threads where a kernel or a sandbox
//! denies `io_uring`. Both accept jobs on region memory, complete each job exactly once and in
//! full, and on drop wait until the kernel no longer accesses the memory.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use rustix::io::Errno;
use tenmil_base::{ErrorCategory, InvalidSegment, Segment};
use tenmil_dma::RegionTable;

use crate::storage_file::StorageFile;
use crate::thread_engine::ThreadEngine;
use crate::uring_engine::FileRing;

/// Open file with jobs in flight.
#[derive(Debug)]
pub struct FileEngine {
    kind: FileEngineKind,
    io_uring_error: Option<Errno>,
}

#[derive(Debug)]
enum FileEngineKind {
    IoUring(Box<FileRing>),
    Threads(ThreadEngine),
}

/// Operation on a file.
#[derive(Clone, Copy, Debug)]
pub enum FileOp<'a> {
    /// Read from the file into memory.
    Read {
        /// File offset.
        offset: u64,
        /// Destination segments.
        into: &'a [Segment],
    },
    /// Write memory to the file.
    Write {
        /// File offset.
        offset: u64,
        /// Source segments.
        from: &'a [Segment],
        /// Whether the data must be on stable storage at completion (FUA).
        fua: bool,
    },
    /// Flush everything written before this was submitted to stable storage (fdatasync).
    Sync,
    /// Deallocate a range; it reads as zeroes (fallocate).
    PunchHole {
        /// File offset.
        offset: u64,
        /// Length of the range.
        len_bytes: u64,
    },
    /// Zero a range and keep it allocated (fallocate).
    ZeroRange {
        /// File offset.
        offset: u64,
        /// Length of the range.
        len_bytes: u64,
    },
}

/// Completion of a job.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct JobCompletion {
    /// Token that was passed at submission.
    pub token: u64,
    /// Success of the whole job, or the kernel's error.
    pub result: Result<(), Errno>,
}

/// A job was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SubmitError {
    /// The number of jobs in flight has reached the depth.
    Full,
    /// The job has more segments than the engine supports.
    TooManySegments,
    /// A segment is outside every region.
    InvalidSegment(InvalidSegment),
}

/// Selection of an engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum EngineChoice {
    /// `io_uring` where it is permitted, else threads.
    #[default]
    Best,
    /// `io_uring` only.
    IoUring,
    /// Threads only.
    Threads,
}

/// Capacity of an engine.
#[derive(Clone, Copy, Debug)]
pub struct EngineLimits {
    /// Jobs in flight.
    pub depth: u16,
    /// Segments per job, after adjacent ones have been merged. At most 1024 (IOV_MAX).
    pub segments_max: u16,
}

/// The requested engine is not available.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    engine: &'static str,
    found: String,
}

impl FileEngine {
    /// Creates an engine for `file` on the memory of `regions`.
    ///
    /// # Panics
    ///
    /// If a limit is zero or exceeds its documented maximum.
    pub fn new(
        file: Arc<StorageFile>,
        regions: &RegionTable,
        capacity: EngineLimits,
        choice: EngineChoice,
    ) -> Result<Self, EngineError> {
        let EngineLimits { depth, segments_max } = capacity;
        assert!(depth > 0 && depth <= 4096, "{depth} jobs at once");
        assert!(segments_max > 0 && segments_max <= 1024, "{segments_max} pieces a job");
        let why_no_ring = match choice {
            EngineChoice::Threads => None,
            EngineChoice::Best | EngineChoice::IoUring => {
                match FileRing::new(Arc::clone(&file), regions, capacity) {
                    Ok(ring) => {
                        return Ok(Self {
                            kind: FileEngineKind::IoUring(Box::new(ring)),
                            io_uring_error: None,
                        });
                    }
                    Err(errno) if choice == EngineChoice::IoUring => {
                        return Err(EngineError { engine: "io_uring", found: errno.to_string() });
                    }
                    Err(errno) => Some(errno),
                }
            }
        };
        let workers = ThreadEngine::new(file, regions, capacity)
            .map_err(|error| EngineError { engine: "threads", found: error.to_string() })?;
        Ok(Self { kind: FileEngineKind::Threads(workers), io_uring_error: why_no_ring })
    }

    /// Whether jobs may use a single segment of kernel-owned memory (ublk zero copy).
    pub fn supports_kernel_buffers(&self) -> bool {
        matches!(self.kind, FileEngineKind::IoUring(_))
    }

    /// Name of the engine: `io_uring` or `threads`.
    pub fn name(&self) -> &'static str {
        match self.kind {
            FileEngineKind::IoUring(_) => "io_uring",
            FileEngineKind::Threads(_) => "threads",
        }
    }

    /// Kernel's reason for denying `io_uring`, if it was requested or preferred.
    pub fn io_uring_error(&self) -> Option<Errno> {
        self.io_uring_error
    }

    /// Submits a job, or returns why it was rejected. The memory belongs to the job until its
    /// completion.
    #[inline]
    pub fn submit(&mut self, token: u64, job: FileOp<'_>) -> Result<(), SubmitError> {
        match &mut self.kind {
            FileEngineKind::IoUring(ring) => ring.submit(token, job),
            FileEngineKind::Threads(workers) => workers.submit(token, job),
        }
    }

    /// Starts all submitted jobs that have not been started. Call once per iteration.
    #[inline]
    pub fn flush(&mut self) {
        match &mut self.kind {
            FileEngineKind::IoUring(ring) => ring.flush(),
            FileEngineKind::Threads(workers) => workers.flush(),
        }
    }

    /// Appends the completions of finished jobs, in any order: never more than the depth.
    #[inline]
    pub fn poll(&mut self, ended: &mut Vec<JobCompletion>) {
        match &mut self.kind {
            FileEngineKind::IoUring(ring) => ring.poll(ended),
            FileEngineKind::Threads(workers) => workers.poll(ended),
        }
    }

    /// Descriptor that becomes readable when a job completes after [`arm`](Self::arm).
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.kind {
            FileEngineKind::IoUring(ring) => ring.descriptor(),
            FileEngineKind::Threads(workers) => workers.descriptor(),
        }
    }

    /// Starts all submitted jobs and arms the descriptor. Returns true if a job has completed
    /// already or could not be started: then the caller must not sleep.
    pub fn arm(&mut self) -> bool {
        match &mut self.kind {
            FileEngineKind::IoUring(ring) => ring.arm(),
            FileEngineKind::Threads(workers) => workers.arm(),
        }
    }

    /// Disarms the descriptor: its owner polls.
    pub fn disarm(&mut self) {
        match &mut self.kind {
            FileEngineKind::IoUring(ring) => ring.disarm(),
            FileEngineKind::Threads(workers) => workers.disarm(),
        }
    }

    /// Whether some jobs could not be started yet: [`flush`](Self::flush) retries.
    pub fn has_unsubmitted(&self) -> bool {
        match &self.kind {
            FileEngineKind::IoUring(ring) => ring.has_unsubmitted(),
            FileEngineKind::Threads(_) => false,
        }
    }

    /// Number of jobs in flight.
    pub fn in_flight(&self) -> usize {
        match &self.kind {
            FileEngineKind::IoUring(ring) => ring.in_flight(),
            FileEngineKind::Threads(workers) => workers.in_flight(),
        }
    }
}

impl EngineError {
    /// Error category: always environment.
    pub const fn category(&self) -> ErrorCategory {
        ErrorCategory::Environment
    }
}

impl fmt::Display for EngineError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "start {} for a file: {}", self.engine, self.found)
    }
}

impl std::error::Error for EngineError {}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use rustix::event::{PollFd, PollFlags, Timespec};
    use tenmil_base::{Memory, RegionId, Segment};
    use tenmil_dma::{MemoryBacking, MemoryMapping, RegionTable};

    use super::{EngineChoice, EngineLimits, FileEngine, FileOp, JobCompletion, SubmitError};
    use crate::Errno;
    use crate::storage_file::{FileOptions, StorageFile};

    const BLOCK: u32 = 4096;

    struct Bench {
        engine: FileEngine,
        file: Arc<StorageFile>,
        regions: RegionTable,
        whole: Segment,
        _directory: tempfile::TempDir,
    }

    /// The same test bench for every engine that this machine permits.
    fn test_engines() -> Vec<Bench> {
        let engines = [EngineChoice::IoUring, EngineChoice::Threads].map(test_engine);
        if engines[0].is_none() {
            println!("skipped: io_uring is not allowed here");
        }
        engines.into_iter().flatten().collect()
    }

    fn test_engine(choice: EngineChoice) -> Option<Bench> {
        let directory = tempfile::tempdir().unwrap();
        let file = Arc::new(
            StorageFile::open(&FileOptions {
                path: directory.path().join("blocks"),
                len_bytes: Some(64 * u64::from(BLOCK)),
                unit_bytes: BLOCK,
                direct: true,
                read_only: false,
            })
            .unwrap(),
        );
        let regions = RegionTable::new(1);
        let whole = regions
            .add_mapping(MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap())
            .unwrap();
        let capacity = EngineLimits { depth: 4, segments_max: 2 };
        let engine = FileEngine::new(Arc::clone(&file), &regions, capacity, choice).ok()?;
        Some(Bench { engine, file, regions, whole, _directory: directory })
    }

    impl Bench {
        fn block_of(&self, index: u32) -> Segment {
            self.whole.slice(index * BLOCK, BLOCK).unwrap()
        }

        /// Completes everything in flight.
        fn await_all(&mut self) -> Vec<JobCompletion> {
            let mut ended = Vec::new();
            self.engine.flush();
            while self.engine.in_flight() > 0 {
                self.engine.poll(&mut ended);
                std::thread::yield_now();
            }
            ended.sort_unstable_by_key(|job| job.token);
            ended
        }

        fn run_job(&mut self, job: FileOp<'_>) -> Result<(), Errno> {
            self.engine.submit(77, job).unwrap();
            let ended = self.await_all();
            assert_eq!((ended.len(), ended[0].token), (1, 77));
            ended[0].result
        }

        fn write_job(&mut self, offset: u64, byte: u8) {
            let from = [self.block_of(0)];
            self.regions.fill(from[0], byte).unwrap();
            self.run_job(FileOp::Write { offset, from: &from, fua: true }).unwrap();
        }

        fn read_job(&mut self, offset: u64) -> Vec<u8> {
            let into = [self.block_of(1)];
            self.run_job(FileOp::Read { offset, into: &into }).unwrap();
            let mut bytes = vec![0; BLOCK as usize];
            self.regions.load(into[0], &mut bytes).unwrap();
            bytes
        }
    }

    #[test]
    fn written_data_is_read_back() {
        for mut bench in test_engines() {
            bench.write_job(8192, 0xa5);
            assert_eq!(bench.read_job(8192), [0xa5; 4096]);
            assert_eq!(bench.read_job(4096), [0; 4096]);
            bench.run_job(FileOp::Sync).unwrap();
        }
    }

    #[test]
    fn segments_are_gathered_and_scattered_in_order() {
        for mut bench in test_engines() {
            let (left, right) = (bench.block_of(9), bench.block_of(2));
            bench.regions.fill(left, 1).unwrap();
            bench.regions.fill(right, 2).unwrap();
            bench.run_job(FileOp::Write { offset: 0, from: &[left, right], fua: false }).unwrap();
            assert_eq!((bench.read_job(0)[0], bench.read_job(4096)[0]), (1, 2));
            bench.run_job(FileOp::Read { offset: 0, into: &[right, left] }).unwrap();
            let first = |segment: Segment| {
                let mut byte = [0];
                bench.regions.load(segment.slice(0, 1).unwrap(), &mut byte).unwrap();
                byte[0]
            };
            assert_eq!((first(right), first(left)), (1, 2));
        }
    }

    #[test]
    fn holes_and_write_zeroes_read_as_zeroes() {
        for mut bench in test_engines() {
            for job in [
                FileOp::PunchHole { offset: 4096, len_bytes: 8192 },
                FileOp::ZeroRange { offset: 4096, len_bytes: 8192 },
            ] {
                for block in 0..4 {
                    bench.write_job(block * 4096, 7);
                }
                let full = bench.file.allocated_bytes();
                match bench.run_job(job) {
                    Ok(()) => {
                        let bytes = [0, 1, 2, 3].map(|block| bench.read_job(block * 4096)[4095]);
                        assert_eq!(bytes, [7, 0, 0, 7], "{job:?}");
                    }
                    // Some file systems support only one of the two, or neither.
                    Err(errno) => assert_eq!(errno, Errno::OPNOTSUPP),
                }
                if matches!(job, FileOp::PunchHole { .. }) {
                    assert!(bench.file.allocated_bytes() <= full);
                }
            }
        }
    }

    #[test]
    fn full_engine_rejects_jobs_until_one_completes() {
        for mut bench in test_engines() {
            let segments = [bench.block_of(0)];
            for token in 0..4 {
                bench.engine.submit(token, FileOp::Read { offset: 0, into: &segments }).unwrap();
            }
            let again = bench.engine.submit(4, FileOp::Sync);
            assert_eq!(again, Err(SubmitError::Full));
            let tokens: Vec<u64> = bench.await_all().iter().map(|ended| ended.token).collect();
            assert_eq!(tokens, [0, 1, 2, 3]);
            bench.run_job(FileOp::Sync).unwrap();
        }
    }

    #[test]
    fn invalid_segment_is_rejected_and_uses_no_slot() {
        for mut bench in test_engines() {
            let stray = Segment { region: RegionId(5), offset: 0, len_bytes: BLOCK };
            let many = [bench.block_of(0), bench.block_of(2), bench.block_of(4)];
            for _ in 0..10 {
                let refused = bench.engine.submit(0, FileOp::Read { offset: 0, into: &[stray] });
                assert!(
                    matches!(refused, Err(SubmitError::InvalidSegment(missing)) if missing.0 == stray)
                );
                let refused = bench.engine.submit(0, FileOp::Read { offset: 0, into: &many });
                assert_eq!(refused, Err(SubmitError::TooManySegments));
            }
            assert_eq!(bench.engine.in_flight(), 0);
            bench.run_job(FileOp::Sync).unwrap();
        }
    }

    #[test]
    fn read_past_the_end_of_the_file_fails() {
        for mut bench in test_engines() {
            let into = [bench.block_of(0), bench.block_of(2)];
            let offset = 63 * u64::from(BLOCK);
            assert_eq!(bench.run_job(FileOp::Read { offset, into: &into }), Err(Errno::IO));
        }
    }

    #[test]
    fn dropping_an_engine_waits_for_its_jobs() {
        for mut bench in test_engines() {
            let from = [bench.block_of(0)];
            bench.regions.fill(from[0], 9).unwrap();
            for block in 0..4 {
                let offset = block * u64::from(BLOCK);
                bench
                    .engine
                    .submit(block, FileOp::Write { offset, from: &from, fua: false })
                    .unwrap();
            }
            drop(bench.engine);
            let held = std::fs::read(bench.file.path()).unwrap();
            assert!(held[..4 * 4096].iter().all(|byte| *byte == 9));
        }
    }

    #[test]
    fn requested_engine_is_used() {
        let bench = test_engine(EngineChoice::Threads).unwrap();
        assert_eq!((bench.engine.name(), bench.engine.io_uring_error()), ("threads", None));
    }

    #[test]
    fn job_completion_wakes_an_armed_thread() {
        for mut bench in test_engines() {
            let into = [bench.block_of(0)];
            for round in 0..50 {
                assert!(!bench.engine.arm() && bench.engine.in_flight() == 0, "nothing to do");
                bench.engine.submit(round, FileOp::Read { offset: 0, into: &into }).unwrap();
                let mut ended = Vec::new();
                while ended.is_empty() {
                    if !bench.engine.arm() {
                        let descriptor = bench.engine.descriptor();
                        let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
                        let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
                        let ready = rustix::event::poll(&mut entries, Some(&limit));
                        assert!(matches!(ready, Ok(1) | Err(Errno::INTR)), "{ready:?}");
                    }
                    bench.engine.disarm();
                    bench.engine.poll(&mut ended);
                }
                assert_eq!(ended, [JobCompletion { token: round, result: Ok(()) }]);
            }
        }
    }
}
