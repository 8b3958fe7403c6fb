//! Instructions per read of a written volume, over memory and beside that alone: counted and not
//! timed.
//!
//! Each count is of one batch of as many reads of 4 KiB as its name ends with, submitted and
//! answered, on a channel that was warmed by some turns. `.ci/instructions` divides.

#![expect(missing_docs, reason = "the macros make items of their own")]

use std::sync::Arc;

use base::{Answers, Backend, Flags, Instant, Medium, Operation, Request, Segment};
use dma::{Region, Regions};
use gungraun::{library_benchmark, library_benchmark_group, main};
use host::Clock;
use tenmil_block::store::{self, Change, OpenStore, Place};
use tenmil_block::uri::Uri;
use tenmil_block::{MediumError, Opened, Opener, Ram};

/// A block device, and reads for it.
struct Reads {
    backend: Box<dyn Backend>,
    requests: Vec<Request>,
    memory: Region,
    answers: Answers,
    now: Instant,
}

/// Blocks of 4 KiB in memory, and in the volume.
const BLOCKS: u64 = 8192;
const VOLUME_BLOCKS: u64 = 4096;

impl Reads {
    fn of(regions: &Regions, mut backend: Box<dyn Backend>, count: u64) -> Self {
        let memory = regions.allocate(4096).expect("memory");
        // Far from each other, as random reads are.
        let read = |token: u64| request(Operation::Read, token, token * 1_237 % VOLUME_BLOCKS);
        (0..VOLUME_BLOCKS).for_each(|lba| write(&mut *backend, memory.segment(), lba));
        let room = usize::try_from(count).unwrap_or(0);
        let (requests, answers) = ((0..count).map(read).collect(), Answers::with_capacity(room));
        let mut reads = Self { backend, requests, memory, answers, now: Instant::default() };
        (0..8).for_each(|_| reads.turn());
        reads
    }

    /// Sends all and takes the answers.
    #[inline(never)]
    fn turn(&mut self) {
        self.now.ns += 1_000;
        let segment = Segment { len_bytes: 4096, ..self.memory.segment() };
        let taken = self.backend.submit(self.now, &self.requests, &[segment]);
        self.backend.flush();
        let answered = self.backend.poll(self.now, &mut self.answers);
        assert_eq!((taken, answered), (self.requests.len(), self.requests.len()));
        self.answers.clear();
    }
}

fn request(operation: Operation, token: u64, lba: u64) -> Request {
    let (blocks, segment_count, flags) = (1, 1, Flags::NONE);
    Request { token, lba, blocks, segment_count, operation, flags, ..Request::NOTHING }
}

/// Writes one block.
fn write(backend: &mut dyn Backend, memory: Segment, lba: u64) {
    let memory = Segment { len_bytes: 4096, ..memory };
    let request = request(Operation::Write, 0, lba);
    let mut answers = Answers::with_capacity(1);
    assert_eq!(backend.submit(Instant::default(), &[request], &[memory]), 1);
    backend.flush();
    while backend.poll(Instant::default(), &mut answers) == 0 {
        host::thread::give_way();
    }
    assert!(answers.as_slice()[0].outcome.is_success());
}

fn ram(regions: &Regions) -> Arc<dyn Medium> {
    Arc::new(Ram::new(regions, 4096, BLOCKS).expect("memory"))
}

/// Memory as it is.
fn bare(count: u64) -> Reads {
    let regions = Regions::new(64);
    let medium = ram(&regions);
    Reads::of(&regions, medium.channel().expect("a channel"), count)
}

/// A volume of a store in memory.
fn volume(count: u64) -> Reads {
    let regions = Regions::new(64);
    let medium = ram(&regions);
    let kind = |_: &Opener<'_>, _: &Uri| -> Result<Opened, MediumError> {
        Ok(Opened::fresh(Arc::clone(&medium), "the same memory"))
    };
    let clock = Clock::kernel();
    let opener = Opener { regions: &regions, clock, seed: 1, more: &[("same", &kind)] };
    let device: Uri = "same:".parse().expect("a name");
    store::create(&opener, &device, "bench", false).expect("room for a store");
    let place = Place::on(&device);
    let open = OpenStore::open(&opener, &place).expect("a store");
    let change = Change::Create {
        name: "v".into(),
        blocks: VOLUME_BLOCKS,
        unit: 16,
        uuid: 1,
        checksums: false,
    };
    open.change(change).expect("a volume");
    let opened = opener.open(&place.with_name("v")).expect("a volume");
    Reads::of(&regions, opened.medium.channel().expect("a channel"), count)
}

#[library_benchmark]
#[bench::memory_1(args = (1,), setup = bare)]
#[bench::memory_128(args = (128,), setup = bare)]
#[bench::volume_1(args = (1,), setup = volume)]
#[bench::volume_128(args = (128,), setup = volume)]
fn volumes(mut reads: Reads) -> Reads {
    reads.turn();
    reads
}

library_benchmark_group!(name = per_read; benchmarks = volumes);
main!(library_benchmark_groups = per_read);
