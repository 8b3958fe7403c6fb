//! Queue without a reactor: requests are submitted and completed.

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoCompletion, IoStatus, Memory, Random,
    Segment,
};
use tenmil_dma::{KernelBufferSource, Region, RegionTable};
use tenmil_drivers::RamDevice;
use tenmil_wire::ublk::{IoDescriptor, IoFlags, IoOp};

use super::super::disk::UblkDisk;
use super::super::queue_driver::QueueDriver;
use super::super::tags::{TagAction, TagTable};
use super::fake_kernel::FakeKernel;
use super::{BLOCK, BLOCKS, io_descriptor, random_byte, test_disk};
use tenmil_linux::ublk::FetchedTag;

pub(super) const DEPTH: u16 = 8;

/// Queue, simulated kernel and device; the test moves everything between them.
pub(super) struct TagTest {
    pub(super) kernel: FakeKernel,
    pub(super) tags: TagTable,
    pub(super) backend: Box<dyn IoChannel>,
    pub(super) regions: RegionTable,
    completions: CompletionBatch,
    _memory: Region,
}

impl TagTest {
    pub(super) fn new() -> Self {
        Self::with_disk(test_disk())
    }

    pub(super) fn with_disk(disk: UblkDisk) -> Self {
        let regions = RegionTable::new(8);
        let medium = RamDevice::new(&regions, BLOCK, BLOCKS).unwrap();
        let bytes = usize::from(DEPTH) * disk.io_bytes_max() as usize;
        let memory = regions.allocate_region(bytes).unwrap();
        let mut kernel = FakeKernel::new(DEPTH, &regions);
        (0..DEPTH).for_each(|tag| kernel.fetch(tag));
        Self {
            kernel,
            tags: TagTable::new(disk, DEPTH, memory.segment()),
            backend: medium.channel().unwrap(),
            regions,
            completions: CompletionBatch::with_capacity(usize::from(DEPTH)),
            _memory: memory,
        }
    }

    /// Session with zero copy.
    pub(super) fn with_zero_copy() -> (Self, Segment) {
        let session = Self::new();
        let descriptor = tempfile::tempfile().unwrap().into();
        let zero_copy_device = KernelBufferSource { descriptor, queue: 0, data_at: |_, _, _| 0 };
        let kernel_buffers = session
            .regions
            .register_kernel_buffers(zero_copy_device, (DEPTH, test_disk().io_bytes_max()))
            .unwrap();
        let tags = session.tags.with_zero_copy(Some(kernel_buffers));
        (Self { tags, ..session }, kernel_buffers)
    }

    fn run_actions(&mut self, mut action: TagAction) {
        loop {
            action = match action {
                TagAction::Nothing => return,
                TagAction::CopyIn { tag, into } => {
                    let is_done = self.kernel.copy_from_kernel(tag, into);
                    self.tags.handle_copy_done(tag, is_done)
                }
                TagAction::CopyOut { tag, from } => {
                    let is_done = self.kernel.copy_to_kernel(tag, from);
                    self.tags.handle_copy_done(tag, is_done)
                }
                TagAction::Commit { tag, result } => {
                    return self.kernel.commit_and_fetch(tag, result);
                }
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
    pub(super) fn run_until_idle(&mut self) {
        let (requests, segments) = self.tags.pending_requests();
        let accepted = self.backend.submit(Instant::default(), requests, segments);
        self.tags.record_submitted(accepted);
        self.backend.flush_submissions();
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
    pub(super) fn run_one_request(&mut self, descriptor: IoDescriptor, data: &[u8]) -> i32 {
        self.kernel.deliver_request(3, descriptor, data);
        self.receive();
        for _ in 0..100 {
            self.run_until_idle();
            if let [(tag, result)] = self.kernel.take_committed_results()[..] {
                assert_eq!(tag, 3);
                return result;
            }
        }
        panic!("{descriptor:?} is never answered");
    }
}

#[test]
fn written_data_is_read_back_and_bytes_are_counted() {
    let mut session = TagTest::new();
    let data: Vec<u8> = (0..2048_u32).map(|byte| (byte % 251) as u8).collect();
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Write, 10, 4), &data), 2048);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Read, 11, 2), &[]), 1024);
    assert_eq!(session.kernel.data(3), data[512..1536]);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::WriteZeroes, 11, 1), &[]), 0);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Read, 10, 4), &[]), 2048);
    let read = session.kernel.data(3);
    assert_eq!((&read[..512], &read[1024..]), (&data[..512], &data[1024..]));
    assert_eq!(read[512..1024], [0; 512]);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Flush, 0, 0), &[]), 0);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Discard, 10, 4), &[]), 0);
    assert_eq!(session.tags.completed_stats().succeeded, 6);
}

#[test]
fn request_flags_of_the_kernel_reach_the_device() {
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
        let request = test_disk()
            .validate_request(&IoDescriptor { flags, ..io_descriptor(op, 2, 1) })
            .unwrap();
        assert_eq!((request.operation, request.flags), (operation, expected), "{op:?} {flags:?}");
        assert_eq!((request.lba, request.blocks), (2, 1));
    }
}

#[test]
fn failed_copy_fails_only_its_request() {
    let mut session = TagTest::new();
    session.kernel.set_copies_fail(true);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Write, 0, 1), &[1; 512]), -5);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Read, 0, 1), &[]), -5);
    session.kernel.set_copies_fail(false);
    assert_eq!(session.run_one_request(io_descriptor(IoOp::Read, 0, 1), &[]), 512);
    assert_eq!(session.kernel.data(3), [0; 512], "nothing was written");
    assert_eq!(
        (session.tags.completed_stats().succeeded, session.tags.completed_stats().failed),
        (1, 2)
    );
}

#[test]
fn device_errors_are_translated_to_kernel_errnos() {
    for (status, expected) in [
        (IoStatus::UNRECOVERED_READ, -61),
        (IoStatus::CAPACITY_EXCEEDED, -28),
        (IoStatus::INVALID_OPCODE, -95),
        (IoStatus::PATH_ERROR, -67),
        (IoStatus::INTERNAL_ERROR, -5),
        (IoStatus::NO_DEVICE, -5),
    ] {
        let mut session = TagTest::new();
        session.kernel.deliver_request(6, io_descriptor(IoOp::Read, 0, 1), &[]);
        session.receive();
        let count = session.tags.pending_requests().0.len();
        session.tags.record_submitted(count);
        session.handle_completion(IoCompletion { token: 6, status, result: 0 });
        assert_eq!(session.kernel.take_committed_results(), [(6, expected)], "{status:?}");
    }
}

/// Byte offset of a sector.
fn byte_offset_of_sector(sector: u64) -> usize {
    usize::try_from(sector * u64::from(BLOCK)).unwrap()
}

#[test]
fn random_requests_over_all_tags_match_a_model() {
    for seed in 0..20 {
        let mut random = Random::new(seed);
        let mut session = TagTest::new();
        let mut model = vec![0_u8; byte_offset_of_sector(BLOCKS)];
        for _ in 0..60 {
            // Ranges of one round do not overlap, so their order does not matter.
            let mut reads = Vec::new();
            for tag in 0..DEPTH {
                let first = u64::from(tag) * 512 + random.below(400);
                let sectors = u32::try_from(1 + random.below(64)).unwrap();
                let range =
                    byte_offset_of_sector(first)..byte_offset_of_sector(first + u64::from(sectors));
                let fill = random_byte(&mut random);
                match random.below(4) {
                    0 => {
                        let data = vec![fill; range.len()];
                        session.kernel.deliver_request(
                            tag,
                            io_descriptor(IoOp::Write, first, sectors),
                            &data,
                        );
                        model[range].fill(fill);
                    }
                    1 => {
                        session.kernel.deliver_request(
                            tag,
                            io_descriptor(IoOp::WriteZeroes, first, sectors),
                            &[],
                        );
                        model[range].fill(0);
                    }
                    _ => {
                        session.kernel.deliver_request(
                            tag,
                            io_descriptor(IoOp::Read, first, sectors),
                            &[],
                        );
                        reads.push((tag, range));
                    }
                }
            }
            session.receive();
            let mut results = Vec::new();
            while results.len() < usize::from(DEPTH) {
                session.run_until_idle();
                results.extend(session.kernel.take_committed_results());
            }
            assert!(results.iter().all(|(_, result)| *result >= 0), "seed {seed}: {results:?}");
            for (tag, range) in reads {
                assert_eq!(session.kernel.data(tag), model[range], "seed {seed}, tag {tag}");
            }
        }
        assert_eq!(session.kernel.pending_command_count(), usize::from(DEPTH));
    }
}

#[test]
fn every_tag_has_its_own_memory() {
    let mut session = TagTest::new();
    for tag in 0..DEPTH {
        let fill = vec![u8::try_from(tag + 1).unwrap(); 32 << 10];
        session.kernel.deliver_request(
            tag,
            io_descriptor(IoOp::Write, u64::from(tag) * 64, 64),
            &fill,
        );
    }
    session.receive();
    let mut parts: Vec<Segment> = session.tags.pending_requests().1.to_vec();
    parts.sort_by_key(|part| part.offset);
    for (at, part) in parts.iter().enumerate() {
        let mut bytes = vec![0; part.len_bytes as usize];
        session.regions.load(*part, &mut bytes).unwrap();
        assert!(bytes.iter().all(|byte| usize::from(*byte) == at + 1), "tag {at}");
    }
    assert!(parts.windows(2).all(|two| two[0].offset + 32768 <= two[1].offset));
}
