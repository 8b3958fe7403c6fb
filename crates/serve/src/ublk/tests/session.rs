//! Queue without a reactor: requests are submitted and completed.

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Random,
    Segment,
};
use tenmil_dma::{KernelBufferSource, Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_wire::ublk::{IoDescriptor, IoFlags, IoOp};

use super::super::disk::Disk;
use super::super::driver::Driver;
use super::super::tags::{TagAction, Tags};
use super::fake::Kernel;
use super::{BLOCK, BLOCKS, descriptor, disk, random_byte};
use tenmil_linux::ublk::FetchedTag;

pub(super) const DEPTH: u16 = 8;

/// Queue, simulated kernel and device; the test moves everything between them.
pub(super) struct Session {
    pub(super) kernel: Kernel,
    pub(super) tags: Tags,
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) regions: RegionTable,
    completions: CompletionBatch,
    _memory: Region,
}

impl Session {
    pub(super) fn new() -> Self {
        Self::of(disk())
    }

    pub(super) fn of(disk: Disk) -> Self {
        let regions = RegionTable::new(8);
        let medium = RamDevice::new(&regions, BLOCK, BLOCKS).unwrap();
        let bytes = usize::from(DEPTH) * disk.io_bytes_max() as usize;
        let memory = regions.allocate(bytes).unwrap();
        let mut kernel = Kernel::new(DEPTH, &regions);
        (0..DEPTH).for_each(|tag| kernel.fetch(tag));
        Self {
            kernel,
            tags: Tags::new(disk, DEPTH, memory.segment()),
            backend: medium.channel().unwrap(),
            regions,
            completions: CompletionBatch::with_capacity(usize::from(DEPTH)),
            _memory: memory,
        }
    }

    /// Session with zero copy.
    pub(super) fn zero_copy() -> (Self, Segment) {
        let session = Self::new();
        let descriptor = tempfile::tempfile().unwrap().into();
        let zero_copy_device = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let kernel_buffers = session
            .regions
            .register_kernel_buffers(zero_copy_device, (DEPTH, disk().io_bytes_max()))
            .unwrap();
        let tags = session.tags.with_zero_copy(Some(kernel_buffers));
        (Self { tags, ..session }, kernel_buffers)
    }

    fn run_actions(&mut self, mut action: TagAction) {
        loop {
            action = match action {
                TagAction::Nothing => return,
                TagAction::CopyIn { tag, into } => {
                    let is_done = self.kernel.copy_in(tag, into);
                    self.tags.handle_copied(tag, is_done)
                }
                TagAction::CopyOut { tag, from } => {
                    let is_done = self.kernel.copy_out(tag, from);
                    self.tags.handle_copied(tag, is_done)
                }
                TagAction::Commit { tag, result } => return self.kernel.commit(tag, result),
            }
        }
    }

    /// Receives the requests of the kernel.
    pub(super) fn receive(&mut self) {
        let mut handle_fetched = Vec::new();
        self.kernel.poll(&mut handle_fetched);
        for FetchedTag { tag, result } in handle_fetched {
            let kernel = self.kernel.clone();
            let action = self.tags.handle_fetched(tag, result, |tag| kernel.descriptor(tag));
            self.run_actions(action);
        }
    }

    /// Lets the device process the pending requests.
    pub(super) fn work(&mut self) {
        let (requests, segments) = self.tags.requests();
        let accepted = self.backend.submit(Instant::default(), requests, segments);
        self.tags.accepted(accepted);
        self.backend.flush();
        self.backend.poll(Instant::default(), &mut self.completions);
        let completions: Vec<IoCompletion> = self.completions.drain().collect();
        for completion in completions {
            self.handle_completion(completion);
        }
    }

    pub(super) fn handle_completion(&mut self, completion: IoCompletion) {
        let action = self.tags.handle_completion(completion);
        self.run_actions(action);
    }

    /// Executes one request and returns its result.
    pub(super) fn one(&mut self, descriptor: IoDescriptor, data: &[u8]) -> i32 {
        self.kernel.request(3, descriptor, data);
        self.receive();
        for _ in 0..100 {
            self.work();
            if let [(tag, result)] = self.kernel.results()[..] {
                assert_eq!(tag, 3);
                return result;
            }
        }
        panic!("{descriptor:?} is never answered");
    }
}

#[test]
fn what_was_written_is_read_and_bytes_are_counted() {
    let mut session = Session::new();
    let data: Vec<u8> = (0..2048_u32).map(|byte| (byte % 251) as u8).collect();
    assert_eq!(session.one(descriptor(IoOp::Write, 10, 4), &data), 2048);
    assert_eq!(session.one(descriptor(IoOp::Read, 11, 2), &[]), 1024);
    assert_eq!(session.kernel.data(3), data[512..1536]);
    assert_eq!(session.one(descriptor(IoOp::WriteZeroes, 11, 1), &[]), 0);
    assert_eq!(session.one(descriptor(IoOp::Read, 10, 4), &[]), 2048);
    let read = session.kernel.data(3);
    assert_eq!((&read[..512], &read[1024..]), (&data[..512], &data[1024..]));
    assert_eq!(read[512..1024], [0; 512]);
    assert_eq!(session.one(descriptor(IoOp::Flush, 0, 0), &[]), 0);
    assert_eq!(session.one(descriptor(IoOp::Discard, 10, 4), &[]), 0);
    assert_eq!(session.tags.done().succeeded, 6);
}

#[test]
fn the_backend_is_asked_for_what_the_flags_say() {
    use tenmil_base::{Operation, RequestFlags};
    let forced = IoFlags::FUA;
    let kept = IoFlags::NO_UNMAP;
    let meta = IoFlags(1 << 11);
    for (op, flags, operation, expected) in [
        (IoOp::Write, IoFlags::NONE, Operation::Write, RequestFlags::NONE),
        (IoOp::Write, forced, Operation::Write, RequestFlags::FUA),
        (IoOp::Read, meta, Operation::Read, RequestFlags::NONE),
        (IoOp::WriteZeroes, IoFlags::NONE, Operation::WriteZeroes, RequestFlags::DEALLOCATE),
        (IoOp::WriteZeroes, kept, Operation::WriteZeroes, RequestFlags::NONE),
        (IoOp::WriteZeroes, IoFlags(forced.0 | kept.0), Operation::WriteZeroes, RequestFlags::FUA),
        (IoOp::Discard, IoFlags::NONE, Operation::Deallocate, RequestFlags::NONE),
    ] {
        let request = disk().admit(&IoDescriptor { flags, ..descriptor(op, 2, 1) }).unwrap();
        assert_eq!((request.operation, request.flags), (operation, expected), "{op:?} {flags:?}");
        assert_eq!((request.lba, request.blocks), (2, 1));
    }
}

#[test]
fn data_that_cannot_be_copied_fail_their_request_and_no_other() {
    let mut session = Session::new();
    session.kernel.refuse_copies(true);
    assert_eq!(session.one(descriptor(IoOp::Write, 0, 1), &[1; 512]), -5);
    assert_eq!(session.one(descriptor(IoOp::Read, 0, 1), &[]), -5);
    session.kernel.refuse_copies(false);
    assert_eq!(session.one(descriptor(IoOp::Read, 0, 1), &[]), 512);
    assert_eq!(session.kernel.data(3), [0; 512], "nothing was written");
    assert_eq!((session.tags.done().succeeded, session.tags.done().failed), (1, 2));
}

#[test]
fn an_error_of_the_device_is_told_in_the_kernels_words() {
    for (status, expected) in [
        (IoStatus::UNRECOVERED_READ, -61),
        (IoStatus::CAPACITY_EXCEEDED, -28),
        (IoStatus::INVALID_OPCODE, -95),
        (IoStatus::PATH_ERROR, -67),
        (IoStatus::INTERNAL_ERROR, -5),
        (IoStatus::NO_DEVICE, -5),
    ] {
        let mut session = Session::new();
        session.kernel.request(6, descriptor(IoOp::Read, 0, 1), &[]);
        session.receive();
        let count = session.tags.requests().0.len();
        session.tags.accepted(count);
        session.handle_completion(IoCompletion { token: 6, status, result: 0 });
        assert_eq!(session.kernel.results(), [(6, expected)], "{status:?}");
    }
}

/// Byte offset of a sector.
fn at(sector: u64) -> usize {
    usize::try_from(sector * u64::from(BLOCK)).unwrap()
}

#[test]
fn random_requests_over_all_tags_find_what_a_model_holds() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut session = Session::new();
        let mut model = vec![0_u8; at(BLOCKS)];
        for _ in 0..60 {
            // Ranges of one round do not overlap, so their order does not matter.
            let mut reads = Vec::new();
            for tag in 0..DEPTH {
                let first = u64::from(tag) * 512 + random.below(400);
                let sectors = u32::try_from(1 + random.below(64)).unwrap();
                let range = at(first)..at(first + u64::from(sectors));
                let fill = random_byte(&mut random);
                match random.below(4) {
                    0 => {
                        let data = vec![fill; range.len()];
                        session.kernel.request(tag, descriptor(IoOp::Write, first, sectors), &data);
                        model[range].fill(fill);
                    }
                    1 => {
                        session.kernel.request(
                            tag,
                            descriptor(IoOp::WriteZeroes, first, sectors),
                            &[],
                        );
                        model[range].fill(0);
                    }
                    _ => {
                        session.kernel.request(tag, descriptor(IoOp::Read, first, sectors), &[]);
                        reads.push((tag, range));
                    }
                }
            }
            session.receive();
            let mut results = Vec::new();
            while results.len() < usize::from(DEPTH) {
                session.work();
                results.extend(session.kernel.results());
            }
            assert!(results.iter().all(|(_, result)| *result >= 0), "seed {seed}: {results:?}");
            for (tag, range) in reads {
                assert_eq!(session.kernel.data(tag), model[range], "seed {seed}, tag {tag}");
            }
        }
        assert_eq!(session.kernel.commands(), usize::from(DEPTH));
    }
}

#[test]
fn every_tag_has_memory_of_its_own() {
    let mut session = Session::new();
    for tag in 0..DEPTH {
        let fill = vec![u8::try_from(tag + 1).unwrap(); 32 << 10];
        session.kernel.request(tag, descriptor(IoOp::Write, u64::from(tag) * 64, 64), &fill);
    }
    session.receive();
    let mut parts: Vec<Segment> = session.tags.requests().1.to_vec();
    parts.sort_by_key(|part| part.offset);
    for (at, part) in parts.iter().enumerate() {
        let mut bytes = vec![0; part.len_bytes as usize];
        session.regions.load(*part, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| usize::from(*byte) == at + 1), "tag {at}");
    }
    assert!(parts.windows(2).all(|two| two[0].offset + 32768 <= two[1].offset));
}
