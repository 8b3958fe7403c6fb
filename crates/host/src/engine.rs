//! Reads and writes of a file that do not block the thread that asks for them.
//!
//! Two engines behind one face: `io_uring`, and a few threads for where a kernel or a sandbox
//! refuses that. Both take jobs over region memory, end each exactly once and whole, and when
//! dropped wait for the kernel to let go of the memory.

use std::fmt;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use base::{Blame, NoSuchMemory, Segment};
use dma::Regions;
use rustix::io::Errno;

use crate::file::File;
use crate::uring::Ring;
use crate::workers::Workers;

/// An open file with jobs under way.
#[derive(Debug)]
pub struct Engine {
    kind: Kind,
    why_no_ring: Option<Errno>,
}

#[derive(Debug)]
enum Kind {
    Ring(Box<Ring>),
    Workers(Workers),
}

/// What to do with a file.
#[derive(Clone, Copy, Debug)]
pub enum Job<'a> {
    /// File to memory.
    Read {
        /// Where in the file.
        offset: u64,
        /// Where to.
        into: &'a [Segment],
    },
    /// Memory to file.
    Write {
        /// Where in the file.
        offset: u64,
        /// Where from.
        from: &'a [Segment],
        /// Whether it must be on stable storage when it ends.
        stable: bool,
    },
    /// All that was written before this was submitted goes to stable storage (fdatasync).
    Sync,
    /// The range reads as zeroes and takes no room (fallocate).
    PunchHole {
        /// Where in the file.
        offset: u64,
        /// How much.
        len_bytes: u64,
    },
    /// The range reads as zeroes and its room is kept (fallocate).
    ZeroRange {
        /// Where in the file.
        offset: u64,
        /// How much.
        len_bytes: u64,
    },
}

/// A job that has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ended {
    /// The token it was submitted with.
    pub token: u64,
    /// All of it was done, or what the kernel answered.
    pub result: Result<(), Errno>,
}

/// Why a job was not taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refused {
    /// As many jobs as there may be are under way.
    Full,
    /// More pieces of memory than the engine was made for.
    TooManySegments,
    /// A piece of memory that does not exist.
    NoSuchMemory(NoSuchMemory),
}

/// Which engine.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Choice {
    /// `io_uring` where it is allowed, else threads.
    #[default]
    Best,
    /// `io_uring` or nothing.
    Ring,
    /// Threads.
    Threads,
}

/// How much an engine can have under way.
#[derive(Clone, Copy, Debug)]
pub struct Capacity {
    /// Jobs.
    pub depth: u16,
    /// Pieces of memory in one job, after neighbours have been joined. At most 1024 (IOV_MAX).
    pub segments_max: u16,
}

/// The engine that was asked for cannot be had.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineError {
    engine: &'static str,
    found: String,
}

impl Engine {
    /// Makes an engine for `file` over the memory of `regions`.
    ///
    /// # Panics
    ///
    /// If the capacity is zero or beyond what its fields' documentation allows.
    pub fn new(
        file: Arc<File>,
        regions: &Regions,
        capacity: Capacity,
        choice: Choice,
    ) -> Result<Self, EngineError> {
        let Capacity { depth, segments_max } = capacity;
        assert!(depth > 0 && depth <= 4096, "{depth} jobs at once");
        assert!(segments_max > 0 && segments_max <= 1024, "{segments_max} pieces a job");
        let why_no_ring = match choice {
            Choice::Threads => None,
            Choice::Best | Choice::Ring => match Ring::new(Arc::clone(&file), regions, capacity) {
                Ok(ring) => {
                    return Ok(Self { kind: Kind::Ring(Box::new(ring)), why_no_ring: None });
                }
                Err(errno) if choice == Choice::Ring => {
                    return Err(EngineError { engine: "io_uring", found: errno.to_string() });
                }
                Err(errno) => Some(errno),
            },
        };
        let workers = Workers::new(file, regions, capacity)
            .map_err(|error| EngineError { engine: "threads", found: error.to_string() })?;
        Ok(Self { kind: Kind::Workers(workers), why_no_ring })
    }

    /// Whether jobs may name what was lent (`Regions::lent`): a piece of it alone.
    pub fn takes_lent(&self) -> bool {
        matches!(self.kind, Kind::Ring(_))
    }

    /// Which engine it is: `io_uring` or `threads`.
    pub fn name(&self) -> &'static str {
        match self.kind {
            Kind::Ring(_) => "io_uring",
            Kind::Workers(_) => "threads",
        }
    }

    /// What the kernel said to `io_uring`, if it was wanted and refused.
    pub fn why_no_ring(&self) -> Option<Errno> {
        self.why_no_ring
    }

    /// Takes a job, or says why not. The memory belongs to the job until it has ended.
    #[inline]
    pub fn submit(&mut self, token: u64, job: Job<'_>) -> Result<(), Refused> {
        match &mut self.kind {
            Kind::Ring(ring) => ring.submit(token, job),
            Kind::Workers(workers) => workers.submit(token, job),
        }
    }

    /// Starts what was submitted and has not been started yet. Once per turn.
    #[inline]
    pub fn flush(&mut self) {
        match &mut self.kind {
            Kind::Ring(ring) => ring.flush(),
            Kind::Workers(workers) => workers.flush(),
        }
    }

    /// Appends what has ended, in whatever order it did: never more than the depth.
    #[inline]
    pub fn poll(&mut self, ended: &mut Vec<Ended>) {
        match &mut self.kind {
            Kind::Ring(ring) => ring.poll(ended),
            Kind::Workers(workers) => workers.poll(ended),
        }
    }

    /// Becomes readable when something has ended since [`arm`](Self::arm).
    pub fn descriptor(&self) -> BorrowedFd<'_> {
        match &self.kind {
            Kind::Ring(ring) => ring.descriptor(),
            Kind::Workers(workers) => workers.descriptor(),
        }
    }

    /// Starts what was submitted and has the descriptor signal from now on. True if something has
    /// ended already, or could not be started: then do not sleep.
    pub fn arm(&mut self) -> bool {
        match &mut self.kind {
            Kind::Ring(ring) => ring.arm(),
            Kind::Workers(workers) => workers.arm(),
        }
    }

    /// The descriptor need not signal: its owner polls.
    pub fn disarm(&mut self) {
        match &mut self.kind {
            Kind::Ring(_) => {}
            Kind::Workers(workers) => workers.disarm(),
        }
    }

    /// Whether some jobs could not be started yet: [`flush`](Self::flush) tries again.
    pub fn has_unstarted(&self) -> bool {
        match &self.kind {
            Kind::Ring(ring) => ring.has_unsubmitted(),
            Kind::Workers(_) => false,
        }
    }

    /// Jobs that have not ended.
    pub fn in_flight(&self) -> usize {
        match &self.kind {
            Kind::Ring(ring) => ring.in_flight(),
            Kind::Workers(workers) => workers.in_flight(),
        }
    }
}

impl EngineError {
    /// Always the machine's move.
    pub const fn blame(&self) -> Blame {
        Blame::Machine
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

    use base::{Memory, RegionId, Segment};
    use dma::{Backing, Mapping, Regions};
    use rustix::event::{PollFd, PollFlags, Timespec};

    use super::{Capacity, Choice, Ended, Engine, Job, Refused};
    use crate::Errno;
    use crate::file::{File, FileOptions};

    const BLOCK: u32 = 4096;

    struct Bench {
        engine: Engine,
        file: Arc<File>,
        regions: Regions,
        whole: Segment,
        _directory: tempfile::TempDir,
    }

    /// The same bench for every engine that this machine allows.
    fn benches() -> Vec<Bench> {
        let engines = [Choice::Ring, Choice::Threads].map(bench);
        if engines[0].is_none() {
            println!("skipped: io_uring is not allowed here");
        }
        engines.into_iter().flatten().collect()
    }

    fn bench(choice: Choice) -> Option<Bench> {
        let directory = tempfile::tempdir().unwrap();
        let file = Arc::new(
            File::open(&FileOptions {
                path: directory.path().join("blocks"),
                len_bytes: Some(64 * u64::from(BLOCK)),
                unit_bytes: BLOCK,
                direct: true,
                read_only: false,
            })
            .unwrap(),
        );
        let regions = Regions::new(1);
        let whole = regions.add(Mapping::new(1 << 20, Backing::Private).unwrap()).unwrap();
        let capacity = Capacity { depth: 4, segments_max: 2 };
        let engine = Engine::new(Arc::clone(&file), &regions, capacity, choice).ok()?;
        Some(Bench { engine, file, regions, whole, _directory: directory })
    }

    impl Bench {
        fn block(&self, index: u32) -> Segment {
            self.whole.slice(index * BLOCK, BLOCK).unwrap()
        }

        /// Ends everything that is under way.
        fn drain(&mut self) -> Vec<Ended> {
            let mut ended = Vec::new();
            self.engine.flush();
            while self.engine.in_flight() > 0 {
                self.engine.poll(&mut ended);
                std::thread::yield_now();
            }
            ended.sort_unstable_by_key(|job| job.token);
            ended
        }

        fn run(&mut self, job: Job<'_>) -> Result<(), Errno> {
            self.engine.submit(77, job).unwrap();
            let ended = self.drain();
            assert_eq!((ended.len(), ended[0].token), (1, 77));
            ended[0].result
        }

        fn write(&mut self, offset: u64, byte: u8) {
            let from = [self.block(0)];
            self.regions.fill(from[0], byte).unwrap();
            self.run(Job::Write { offset, from: &from, stable: true }).unwrap();
        }

        fn read(&mut self, offset: u64) -> Vec<u8> {
            let into = [self.block(1)];
            self.run(Job::Read { offset, into: &into }).unwrap();
            let mut bytes = vec![0; BLOCK as usize];
            self.regions.load(into[0], &mut bytes).unwrap();
            bytes
        }
    }

    #[test]
    fn what_was_written_is_read() {
        for mut bench in benches() {
            bench.write(8192, 0xa5);
            assert_eq!(bench.read(8192), [0xa5; 4096]);
            assert_eq!(bench.read(4096), [0; 4096]);
            bench.run(Job::Sync).unwrap();
        }
    }

    #[test]
    fn pieces_of_memory_are_gathered_and_scattered_in_order() {
        for mut bench in benches() {
            let (left, right) = (bench.block(9), bench.block(2));
            bench.regions.fill(left, 1).unwrap();
            bench.regions.fill(right, 2).unwrap();
            bench.run(Job::Write { offset: 0, from: &[left, right], stable: false }).unwrap();
            assert_eq!((bench.read(0)[0], bench.read(4096)[0]), (1, 2));
            bench.run(Job::Read { offset: 0, into: &[right, left] }).unwrap();
            let first = |segment: Segment| {
                let mut byte = [0];
                bench.regions.load(segment.slice(0, 1).unwrap(), &mut byte).unwrap();
                byte[0]
            };
            assert_eq!((first(right), first(left)), (1, 2));
        }
    }

    #[test]
    fn holes_and_zeroes_read_as_zeroes() {
        for mut bench in benches() {
            for job in [
                Job::PunchHole { offset: 4096, len_bytes: 8192 },
                Job::ZeroRange { offset: 4096, len_bytes: 8192 },
            ] {
                for block in 0..4 {
                    bench.write(block * 4096, 7);
                }
                let full = bench.file.allocated_bytes();
                match bench.run(job) {
                    Ok(()) => {
                        let bytes = [0, 1, 2, 3].map(|block| bench.read(block * 4096)[4095]);
                        assert_eq!(bytes, [7, 0, 0, 7], "{job:?}");
                    }
                    // Some file systems have only one of the two, or neither.
                    Err(errno) => assert_eq!(errno, Errno::OPNOTSUPP),
                }
                if matches!(job, Job::PunchHole { .. }) {
                    assert!(bench.file.allocated_bytes() <= full);
                }
            }
        }
    }

    #[test]
    fn a_full_engine_refuses_and_goes_on_when_something_has_ended() {
        for mut bench in benches() {
            let segments = [bench.block(0)];
            for token in 0..4 {
                bench.engine.submit(token, Job::Read { offset: 0, into: &segments }).unwrap();
            }
            let again = bench.engine.submit(4, Job::Sync);
            assert_eq!(again, Err(Refused::Full));
            let tokens: Vec<u64> = bench.drain().iter().map(|ended| ended.token).collect();
            assert_eq!(tokens, [0, 1, 2, 3]);
            bench.run(Job::Sync).unwrap();
        }
    }

    #[test]
    fn memory_that_does_not_exist_is_refused_and_takes_no_place() {
        for mut bench in benches() {
            let stray = Segment { region: RegionId(5), offset: 0, len_bytes: BLOCK };
            let many = [bench.block(0), bench.block(2), bench.block(4)];
            for _ in 0..10 {
                let refused = bench.engine.submit(0, Job::Read { offset: 0, into: &[stray] });
                assert!(
                    matches!(refused, Err(Refused::NoSuchMemory(missing)) if missing.0 == stray)
                );
                let refused = bench.engine.submit(0, Job::Read { offset: 0, into: &many });
                assert_eq!(refused, Err(Refused::TooManySegments));
            }
            assert_eq!(bench.engine.in_flight(), 0);
            bench.run(Job::Sync).unwrap();
        }
    }

    #[test]
    fn a_read_past_the_end_of_the_file_fails() {
        for mut bench in benches() {
            let into = [bench.block(0), bench.block(2)];
            let offset = 63 * u64::from(BLOCK);
            assert_eq!(bench.run(Job::Read { offset, into: &into }), Err(Errno::IO));
        }
    }

    #[test]
    fn dropping_an_engine_ends_its_jobs_first() {
        for mut bench in benches() {
            let from = [bench.block(0)];
            bench.regions.fill(from[0], 9).unwrap();
            for block in 0..4 {
                let offset = block * u64::from(BLOCK);
                bench
                    .engine
                    .submit(block, Job::Write { offset, from: &from, stable: false })
                    .unwrap();
            }
            drop(bench.engine);
            let held = std::fs::read(bench.file.path()).unwrap();
            assert!(held[..4 * 4096].iter().all(|byte| *byte == 9));
        }
    }

    #[test]
    fn the_engine_that_was_asked_for_is_the_one_that_runs() {
        let bench = bench(Choice::Threads).unwrap();
        assert_eq!((bench.engine.name(), bench.engine.why_no_ring()), ("threads", None));
    }

    #[test]
    fn one_who_sleeps_on_an_engine_is_woken_by_the_end_of_a_job() {
        for mut bench in benches() {
            let into = [bench.block(0)];
            for round in 0..50 {
                assert!(!bench.engine.arm() && bench.engine.in_flight() == 0, "nothing to do");
                bench.engine.submit(round, Job::Read { offset: 0, into: &into }).unwrap();
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
                assert_eq!(ended, [Ended { token: round, result: Ok(()) }]);
            }
        }
    }
}
