//! Several engines that share a ring.

use std::os::fd::AsRawFd;
use std::sync::Arc;

use rustix::event::{PollFd, PollFlags, Timespec};
use tenmil_base::{ChannelGroup, Memory, Segment};
use tenmil_dma::{KernelBufferSource, MemoryBacking, MemoryMapping, RegionTable};

use super::FileRing;
use super::ring::{Ring, RingHandle};
use crate::Errno;
use crate::file_engine::{EngineLimits, FileOp, JobCompletion};
use crate::named_thread::{NamedThread, yield_cpu};
use crate::storage_file::{FileOptions, StorageFile};

const BLOCK: u32 = 4096;
const DEPTH: u16 = 16;

/// Engines of one group, each with a file of its own.
struct Fixture {
    engines: Vec<FileRing>,
    regions: RegionTable,
    memory: Segment,
    directory: tempfile::TempDir,
}

impl Fixture {
    fn new(count: usize) -> Option<Self> {
        let directory = tempfile::tempdir().unwrap();
        let regions = RegionTable::new(4);
        let mapping = MemoryMapping::new(1 << 20, MemoryBacking::Private).unwrap();
        let memory = regions.add_mapping(mapping).unwrap();
        let engines = ChannelGroup::open_together(|| {
            (0..count).map(|index| engine(&directory, &regions, index)).collect::<Option<_>>()
        });
        if engines.is_none() {
            println!("skipped: io_uring is not allowed here");
        }
        Some(Self { engines: engines?, regions, memory, directory })
    }

    fn block(&self, index: u32) -> Segment {
        self.memory.slice(index * BLOCK, BLOCK).unwrap()
    }

    fn submit_read(&mut self, engine: usize, token: u64) {
        let into = [self.block(u32::try_from(engine).unwrap())];
        self.engines[engine].submit(token, FileOp::Read { offset: 0, into: &into }).unwrap();
    }

    /// Submits the jobs of all engines, and waits until the ring holds the completions of all.
    fn await_in_ring(&mut self) {
        let jobs: usize = self.engines.iter().map(FileRing::in_flight).sum();
        self.engines[0].flush();
        while completions_in_ring(&mut self.engines[0]) < jobs {
            yield_cpu();
        }
    }
}

fn engine(directory: &tempfile::TempDir, regions: &RegionTable, index: usize) -> Option<FileRing> {
    let options = FileOptions {
        path: directory.path().join(index.to_string()),
        len_bytes: Some(1 << 20),
        unit_bytes: BLOCK,
        direct: false,
        read_only: false,
    };
    let file = Arc::new(StorageFile::open(&options).unwrap());
    let limits = EngineLimits { depth: DEPTH, segments_max: 1 };
    FileRing::new(file, regions, limits).ok()
}

fn completions_in_ring(engine: &mut FileRing) -> usize {
    engine.ring.access(|ring: &mut Ring| ring.uring.completion().len())
}

fn is_readable(engine: &FileRing) -> bool {
    let descriptor = engine.descriptor();
    let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
    rustix::event::poll(&mut entries, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
}

fn poll(engine: &mut FileRing) -> Vec<u64> {
    let mut ended = Vec::new();
    engine.poll(&mut ended);
    assert!(ended.iter().all(|one| one.result == Ok(())), "{ended:?}");
    let mut tokens: Vec<u64> = ended.iter().map(|one| one.token).collect();
    tokens.sort_unstable();
    tokens
}

fn rings(engines: &[FileRing]) -> usize {
    let mut rings: Vec<i32> = engines.iter().map(|one| one.descriptor().as_raw_fd()).collect();
    rings.sort_unstable();
    rings.dedup();
    rings.len()
}

#[test]
fn engine_of_no_group_has_a_ring_of_its_own() {
    let Some(fixture) = Fixture::new(2) else { return };
    assert_eq!(rings(&fixture.engines), 1);
    let regions = RegionTable::new(1);
    let alone = [(); 2].map(|()| engine(&tempfile::tempdir().unwrap(), &regions, 0));
    let [Some(one), Some(other)] = alone else {
        return println!("skipped: the user may lock no more memory");
    };
    let alone = [one, other];
    assert_eq!(rings(&alone), 2);
    assert!(alone.iter().all(|one| matches!(one.ring, RingHandle::Own(_))));
}

#[test]
fn one_submission_and_one_poll_serve_all_engines() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    fixture.submit_read(0, 10);
    // Entries stay in the queue until the flush of any engine.
    assert!(fixture.engines.iter().all(FileRing::has_unsubmitted));
    fixture.engines[1].flush();
    assert!(!fixture.engines.iter().any(FileRing::has_unsubmitted));
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
    assert_eq!(completions_in_ring(&mut fixture.engines[0]), 0, "both were taken");
    assert_eq!(poll(&mut fixture.engines[0]), [10]);
}

#[test]
fn each_engine_accesses_its_own_file() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    for (engine, byte) in [(0, 1), (1, 2)] {
        let from = [fixture.block(9)];
        fixture.regions.fill(from[0], byte).unwrap();
        let write = FileOp::Write { offset: 0, from: &from, fua: true };
        fixture.engines[engine].submit(0, write).unwrap();
        fixture.await_in_ring();
        assert_eq!(poll(&mut fixture.engines[engine]), [0]);
        fixture.engines[engine].submit(1, FileOp::Sync).unwrap();
        fixture.await_in_ring();
        assert_eq!(poll(&mut fixture.engines[engine]), [1]);
    }
    for (name, byte) in [("0", 1), ("1", 2)] {
        assert_eq!(std::fs::read(fixture.directory.path().join(name)).unwrap()[0], byte);
    }
}

#[test]
fn completion_that_another_engine_took_prevents_the_sleep() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    fixture.submit_read(0, 10);
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    assert_eq!(poll(&mut fixture.engines[0]), [10]);
    assert!(!is_readable(&fixture.engines[1]), "the ring is empty");
    assert!(fixture.engines[1].arm(), "its completion has arrived");
    fixture.engines[1].disarm();
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
    assert!(!fixture.engines[1].arm());
}

#[test]
fn armed_engine_is_woken_although_another_one_polls() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    assert!(!fixture.engines[1].arm());
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    fixture.submit_read(0, 10);
    fixture.await_in_ring();
    // What follows the completion of the armed engine waits for it.
    assert_eq!(poll(&mut fixture.engines[0]), []);
    assert!(is_readable(&fixture.engines[1]));
    assert!(fixture.engines[0].arm(), "nor does this one sleep");
    fixture.engines.iter_mut().for_each(FileRing::disarm);
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
    assert_eq!(poll(&mut fixture.engines[0]), [10]);
    assert!(!is_readable(&fixture.engines[1]));
}

#[test]
fn armed_engine_polls_its_own_completions() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    assert!(!fixture.engines[0].arm());
    fixture.submit_read(0, 10);
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    assert_eq!(poll(&mut fixture.engines[0]), [10]);
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
}

#[test]
fn dropped_engine_waits_for_its_own_jobs_only() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    // Reading an empty pipe never ends, until something is written.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    let place = fixture.engines[1].tag.file(super::FILE).0;
    fixture.engines[1].ring.access(|ring| {
        let pipe = [reader.as_raw_fd()];
        ring.uring.submitter().register_files_update(place, &pipe).unwrap();
    });
    fixture.submit_read(1, 20);
    fixture.submit_read(0, 10);
    fixture.engines[0].flush();
    drop(fixture.engines.remove(0));
    assert_eq!(fixture.engines[0].in_flight(), 1);
    assert_eq!(poll(&mut fixture.engines[0]), []);
    rustix::io::write(&writer, &[7; BLOCK as usize]).unwrap();
    fixture.await_in_ring();
    assert_eq!(poll(&mut fixture.engines[0]), [20]);
}

#[test]
fn dropped_engine_passes_an_armed_one_and_wakes_it() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    assert!(!fixture.engines[1].arm());
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    fixture.submit_read(0, 10);
    fixture.await_in_ring();
    drop(fixture.engines.remove(0));
    assert!(is_readable(&fixture.engines[0]), "in place of the completion that was taken");
    fixture.engines[0].disarm();
    assert_eq!(poll(&mut fixture.engines[0]), [20]);
    assert!(!fixture.engines[0].arm(), "the wake-up is over");
}

#[test]
fn place_of_a_dropped_engine_is_used_again_and_old_completions_are_ignored() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    let old = fixture.engines[1].tag;
    // A pipe in place of its file: its reader sees the end when the last writer is closed.
    let (reader, writer) = rustix::pipe::pipe().unwrap();
    fixture.engines[1].ring.access(|ring| {
        let pipe = [writer.as_raw_fd()];
        ring.uring.submitter().register_files_update(old.file(super::FILE).0, &pipe).unwrap();
    });
    drop(writer);
    drop(fixture.engines.pop());
    let mut entries = [PollFd::new(&reader, PollFlags::IN)];
    let limit = Timespec { tv_sec: 10, tv_nsec: 0 };
    assert_eq!(rustix::event::poll(&mut entries, Some(&limit)), Ok(1), "its files are closed");
    let RingHandle::Shared(ring) = &fixture.engines[0].ring else { panic!("a ring of its own") };
    let ring = Arc::clone(ring);
    let joined = ChannelGroup::open_together(|| {
        ChannelGroup::current().unwrap().add_resource(&ring);
        engine(&fixture.directory, &fixture.regions, 1).unwrap()
    });
    assert_eq!((joined.tag.number, rings(&fixture.engines)), (old.number, 1));
    assert_ne!(joined.tag, old);
    fixture.engines.push(joined);
    fixture.engines[1].ring.access(|ring| {
        let stale = io_uring::opcode::Nop::new().build().user_data(old.user_data(3));
        // SAFETY: the entry refers to no memory.
        assert!(unsafe { ring.push(&[stale]) });
        ring.flush();
    });
    while completions_in_ring(&mut fixture.engines[0]) < 1 {
        yield_cpu();
    }
    assert_eq!(poll(&mut fixture.engines[0]), []);
    assert_eq!(poll(&mut fixture.engines[1]), []);
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
}

#[test]
fn full_submission_queue_is_submitted_and_loses_nothing() {
    let Some(mut fixture) = Fixture::new(8) else { return };
    // Two engines in the first ring, and the other six in the second, whose queue of submissions is
    // that of one engine.
    assert_eq!(rings(&fixture.engines), 2);
    for round in 0..20 {
        for token in 0..u64::from(DEPTH) {
            (0..8).for_each(|engine| fixture.submit_read(engine, token));
        }
        let mut found = vec![Vec::new(); 8];
        while found.iter().any(|tokens: &Vec<u64>| tokens.len() < usize::from(DEPTH)) {
            for (engine, found) in fixture.engines.iter_mut().zip(&mut found) {
                found.extend(poll(engine));
            }
        }
        for tokens in &mut found {
            tokens.sort_unstable();
            assert_eq!(*tokens, (0..u64::from(DEPTH)).collect::<Vec<_>>(), "round {round}");
        }
    }
}

#[test]
fn failure_of_one_engine_does_not_affect_another() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    let place = fixture.engines[0].tag.file(super::FILE).0;
    fixture.engines[0].ring.access(|ring| {
        ring.uring.submitter().register_files_update(place, &[-1]).unwrap();
    });
    fixture.submit_read(0, 10);
    fixture.submit_read(1, 20);
    fixture.await_in_ring();
    let mut ended = Vec::new();
    fixture.engines[0].poll(&mut ended);
    assert_eq!(ended, [JobCompletion { token: 10, result: Err(Errno::BADF) }]);
    assert_eq!(poll(&mut fixture.engines[1]), [20]);
}

#[test]
fn kernel_buffers_of_engines_have_different_places() {
    let Some(mut fixture) = Fixture::new(2) else { return };
    let descriptor = tempfile::tempfile().unwrap().into();
    let lender = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
    let leased = fixture.regions.register_kernel_buffers(lender, (16, BLOCK)).unwrap();
    for engine in [0, 1] {
        let place = fixture.engines[engine].tag.number * DEPTH;
        let ring = &mut fixture.engines[engine];
        assert_eq!(ring.ring.inspect(|shared| shared.buffer_place(ring.tag, 3)), place + 3);
        let into = [leased.slice(0, BLOCK).unwrap()];
        ring.submit(9, FileOp::Read { offset: 0, into: &into }).unwrap();
        ring.flush();
    }
    // It is no ublk device: every job fails, and is completed once.
    for engine in [1, 0] {
        let mut ended = Vec::new();
        while ended.is_empty() {
            fixture.engines[engine].poll(&mut ended);
        }
        assert!(ended.len() == 1 && ended[0].result.is_err(), "{ended:?}");
        assert_eq!(fixture.engines[engine].in_flight(), 0);
    }
}

#[test]
fn engines_on_two_threads_wake_each_other() {
    const JOBS: u64 = 2_000;
    let Some(fixture) = Fixture::new(2) else { return };
    let block = [fixture.block(0), fixture.block(1)];
    let Fixture { mut engines, regions, directory, .. } = fixture;
    let run = |mut engine: FileRing, into: Segment| {
        for token in 0..JOBS {
            engine.submit(token, FileOp::Read { offset: 0, into: &[into] }).unwrap();
            let mut ended = Vec::new();
            while ended.is_empty() {
                if !engine.arm() {
                    let descriptor = engine.descriptor();
                    let mut entries = [PollFd::new(&descriptor, PollFlags::IN)];
                    let limit = Timespec { tv_sec: 20, tv_nsec: 0 };
                    let ready = rustix::event::poll(&mut entries, Some(&limit));
                    assert!(matches!(ready, Ok(1) | Err(Errno::INTR)), "{ready:?} at {token}");
                }
                engine.disarm();
                engine.poll(&mut ended);
            }
            assert_eq!(ended, [JobCompletion { token, result: Ok(()) }]);
        }
        engine
    };
    let other = engines.pop().unwrap();
    let thread = NamedThread::spawn("other", None, move |_: &_| run(other, block[1])).unwrap();
    let one = run(engines.pop().unwrap(), block[0]);
    drop(one);
    drop(thread.join());
    drop((regions, directory));
}

#[test]
fn group_of_a_hundred_engines_has_few_rings() {
    let Some(mut fixture) = Fixture::new(100) else { return };
    assert_eq!(rings(&fixture.engines), 4);
    (0..100).for_each(|engine| fixture.submit_read(engine, engine as u64));
    fixture.engines.iter_mut().for_each(FileRing::flush);
    for (engine, token) in fixture.engines.iter_mut().zip(0..) {
        let mut found = Vec::new();
        while found.is_empty() {
            found = poll(engine);
        }
        assert_eq!(found, [token]);
    }
    assert!(fixture.engines.iter().all(|one| one.in_flight() == 0));
}
