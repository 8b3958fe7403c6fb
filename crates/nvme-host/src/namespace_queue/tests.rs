mod interrupt_vector;
mod lost_writes;
mod raw;
mod splits;

use core::convert::Infallible;

use tenmil_base::{
    ChannelWakeup, CompletionBatch, Durability, Instant, IoChannel, IoStatus, Operation,
    OperationSet, Random, RegionId, Request, RequestFlags, Segment, Span,
};
use tenmil_wire::io::copy::{CopyFormat, CopyRange};
use tenmil_wire::io::dataset::{DatasetManagement, DatasetRange};
use tenmil_wire::{Command, TypedCommand};

use super::{BlocksMax, Metadata, NamespaceQueue, NamespaceView, ProtectionChecks, QueueSizes};
use crate::data_pointer::SglSupport;
use crate::fake_device::{FakeDma, FakeDoorbell, FakeQueue};
use crate::fast_path_options::FastPathOptions;
use crate::queue_link::{ControllerLinkEnd, QueueState, create_link};
use crate::queue_pair::{QueueDoorbell, QueueMemory, QueuePair, QueueSetup, RingTransport};

const NOW: Instant = Instant { ns: 5 };
const BLOCK: u32 = 512;
const NSID: u32 = 3;

const VIEW: NamespaceView = NamespaceView {
    nsid: NSID,
    block_size: BLOCK,
    block_count: 1 << 20,
    metadata: Metadata::None,
    protection: ProtectionChecks {
        action: false,
        check_guard: false,
        check_application: false,
        check_reference: false,
        reference_is_lba: false,
    },
    transfer_bytes_max: 0,
    optimal_boundary_blocks: 0,
    atomic_write_blocks: 8,
    durability: Durability::VolatileCache,
    support: OperationSet::from_operations(&Operation::ALL),
    sgl: SglSupport::None,
    page_bytes: 4096,
    blocks_max: BlocksMax {
        write_zeroes: 0,
        verify: 0,
        write_uncorrectable: 0,
        deallocate: 0,
        copy: 0,
        compare_and_write: 8,
    },
};

struct NamespaceQueueHarness {
    namespace: NamespaceQueue<RingTransport<FakeDma, FakeDoorbell>>,
    device: FakeQueue,
    controller: ControllerLinkEnd<Infallible>,
    completions: CompletionBatch,
    dma: FakeDma,
}

impl NamespaceQueueHarness {
    fn new(view: NamespaceView, depth: u32) -> Self {
        let dma = FakeDma::new(64);
        let memory = QueueMemory::allocate(&dma, depth, depth).unwrap();
        let device = FakeQueue::new(&dma, memory);
        let (controller, queue_end) = create_link(1);
        let setup = QueueSetup {
            memory,
            submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
            completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
            link: queue_end,
            timeout: Span::from_ms(800),
            techniques: FastPathOptions::default(),
        };
        let queue = QueuePair::new(&dma, setup);
        controller.run(None);
        let sizes = QueueSizes { parents: 2, segments: 8 };
        let namespace = NamespaceQueue::new(queue, view, sizes).unwrap();
        Self { namespace, device, controller, completions: CompletionBatch::with_capacity(64), dma }
    }

    fn submit(&mut self, request: Request, segments: &[Segment]) -> bool {
        let taken = self.namespace.submit(NOW, &[request], segments);
        self.namespace.flush_submissions();
        self.device.fetch();
        taken == 1
    }

    /// Submits, and returns the only command that results.
    fn submit_for_command(&mut self, request: Request, segments: &[Segment]) -> Command {
        assert!(self.submit(request, segments));
        assert_eq!(self.device.fetched.len(), 1, "{request:?}");
        let command = self.device.complete_next(0);
        assert_eq!(self.poll(), [(request.token, IoStatus::SUCCESS)]);
        command
    }

    /// Submits a request that must be rejected, and returns its status.
    fn submit_for_rejection(&mut self, request: Request, segments: &[Segment]) -> IoStatus {
        assert!(self.submit(request, segments));
        assert!(self.device.fetched.is_empty(), "{request:?} was sent");
        assert_eq!(self.namespace.wake_at(), Instant::default());
        let [(token, status)] = self.poll()[..] else { panic!("{request:?} was not answered") };
        assert_eq!(token, request.token);
        status
    }

    fn poll(&mut self) -> Vec<(u64, IoStatus)> {
        self.namespace.poll(NOW, &mut self.completions);
        self.device.fetch();
        self.completions.drain().map(|answer| (answer.token, answer.status)).collect()
    }

    /// Completes everything until nothing is left, and returns the commands and the completions.
    fn complete_all(&mut self) -> (Vec<Command>, Vec<(u64, IoStatus)>) {
        let (mut commands, mut completions) = (Vec::new(), Vec::new());
        loop {
            while !self.device.fetched.is_empty() {
                commands.push(self.device.complete_next(0));
            }
            completions.extend(self.poll());
            if self.device.fetched.is_empty() && self.namespace.queue().in_flight() == 0 {
                return (commands, completions);
            }
        }
    }

    fn bytes_at<const N: usize>(&self, iova: u64) -> [u8; N] {
        self.dma.bytes_at(iova)
    }
}

fn request(operation: Operation, lba: u64, blocks: u32, segments: u16) -> Request {
    Request {
        token: 77,
        lba,
        operand: 0,
        blocks,
        segment_first: 0,
        segment_count: segments,
        metadata_count: 0,
        operation,
        flags: RequestFlags::NONE,
    }
}

fn read_request(lba: u64, blocks: u32, segments: u16) -> Request {
    request(Operation::Read, lba, blocks, segments)
}

fn segment(region: u32, offset: u64, len_bytes: u32) -> Segment {
    Segment { region: RegionId(region), offset, len_bytes }
}

fn block_count_of(command: &Command) -> u32 {
    (command.cdw12() & 0xffff) + 1
}

fn slba_of(command: &Command) -> u64 {
    u64::from(command.cdw10()) | u64::from(command.cdw11()) << 32
}

#[test]
fn a_page_is_read_with_one_prp_entry() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    let command =
        harness.submit_for_command(read_request(0x1_2345_6789, 8, 1), &[segment(1, 8192, 4096)]);
    let expected = tenmil_wire::io::Read {
        nsid: NSID,
        slba: 0x1_2345_6789,
        nlb: 7,
        ..tenmil_wire::io::Read::default()
    };
    assert_eq!(tenmil_wire::io::Read::parse(&command), Ok(expected));
    assert_eq!((command.prp1(), command.prp2()), ((2 << 32) + 8192, 0));
}

/// Both paths create the same command, bit by bit, wherever the fast path applies.
#[test]
fn fast_and_slow_paths_build_the_same_command() {
    let checked = ProtectionChecks {
        check_reference: true,
        check_guard: true,
        reference_is_lba: true,
        ..ProtectionChecks::default()
    };
    let views = [
        VIEW,
        NamespaceView { transfer_bytes_max: 16 * BLOCK, ..VIEW },
        NamespaceView { optimal_boundary_blocks: 8, protection: checked, ..VIEW },
        NamespaceView { optimal_boundary_blocks: 6, ..VIEW },
        NamespaceView { metadata: Metadata::Interleaved(8), ..VIEW },
    ];
    let mut random = Random::new(3);
    let mut short = 0;
    for view in views {
        let mut harness = NamespaceQueueHarness::new(view, 8);
        for _ in 0..3000 {
            let operation = if random.chance(1, 2) { Operation::Read } else { Operation::Write };
            let blocks = u32::try_from(random.below(20)).unwrap();
            let lba = random.below(1 << 40);
            let len_bytes = blocks * view.block_bytes() + u32::from(random.chance(1, 20));
            let segments = [segment(1, 4 * random.below(4096), len_bytes)];
            let flags = RequestFlags(u8::try_from(random.below(8)).unwrap());
            let request = Request { flags, ..request(operation, lba, blocks, 1) };
            let Some(command) = harness.namespace.fast_path_command(&request, &segments) else {
                continue;
            };
            short += 1;
            let builder = &mut harness.namespace.builder;
            assert_eq!(builder.check_request(&request, &segments), Ok(()));
            let slowly = builder.next_command(0, &request, &segments, 0);
            assert_eq!(slowly, Ok((command, blocks)), "{view:?} {request:?}");
        }
    }
    assert!(short > 3000, "{short} of 15000 went the short way");
}

/// Batches in which runs of similar requests begin and end everywhere, with rings that wrap: two queues,
/// one of which takes every request by itself, must send the same commands and return the same
/// completions.
#[test]
fn batch_sends_the_commands_of_its_single_requests() {
    let mut random = Random::new(11);
    let mut worlds = [(); 2].map(|()| NamespaceQueueHarness::new(VIEW, 8));
    worlds[1].namespace.short_way.is_simple = false;
    let mut sent = [0, 0];
    for turn in 0..4000 {
        let count = usize::try_from(random.below(12)).unwrap();
        let mut segments = Vec::new();
        let mut like = (8, 4096);
        let requests: Vec<Request> = (0..count)
            .map(|_| {
                if random.chance(1, 6) {
                    like = [(1, 512), (8, 4096), (8, 4095), (16, 8192), (0, 0)]
                        [usize::try_from(random.below(5)).unwrap()];
                }
                let (blocks, len_bytes) = like;
                let region = if random.chance(1, 20) { 100 } else { 1 };
                let offset = 4096 * random.below(8) + 512 * u64::from(random.chance(1, 10));
                segments.push(segment(region, offset, len_bytes));
                let kinds = [Operation::Read, Operation::Write, Operation::Flush];
                let kind = if random.chance(1, 15) { 2 } else { random.below(2) };
                let kind = kinds[usize::try_from(kind).unwrap()];
                let lba = random.below(1 << 20);
                let flags =
                    if random.chance(1, 15) { RequestFlags::FUA } else { RequestFlags::NONE };
                let segment_count = if kind == Operation::Flush { 0 } else { 1 };
                let segment_first = u32::try_from(segments.len() - 1).unwrap();
                let blocks = if kind == Operation::Flush { 0 } else { blocks };
                let request = request(kind, lba, blocks, segment_count);
                Request { token: random.next_u64(), segment_first, flags, ..request }
            })
            .collect();
        let taken = worlds.each_mut().map(|harness| {
            let taken = harness.namespace.submit(NOW, &requests, &segments);
            harness.namespace.flush_submissions();
            harness.device.fetch();
            taken
        });
        assert_eq!(taken[0], taken[1], "turn {turn}");
        assert_eq!(worlds[0].device.fetched, worlds[1].device.fetched, "turn {turn}");
        sent[0] += worlds[0].device.fetched.len();
        sent[1] += usize::from(taken[0] < count);
        let completed = random.below(9);
        let completions = worlds.each_mut().map(|harness| {
            for _ in 0..completed.min(harness.device.fetched.len() as u64) {
                harness.device.complete_next(0);
            }
            harness.poll()
        });
        assert_eq!(completions[0], completions[1], "turn {turn}");
    }
    assert!(
        sent[0] > 4000 && sent[1] > 400,
        "{sent:?}: commands sent, and batches that met a limit"
    );
}

#[test]
fn fast_path_serves_common_requests() {
    let harness =
        NamespaceQueueHarness::new(NamespaceView { transfer_bytes_max: 65_536, ..VIEW }, 8);
    let short = |request: Request, segments: &[Segment]| {
        harness.namespace.fast_path_command(&request, segments).is_some()
    };
    assert!(short(read_request(0, 8, 1), &[segment(1, 0, 4096)]));
    assert!(short(read_request(0, 16, 1), &[segment(1, 4096, 8192)]));
    assert!(short(read_request(0, 1, 1), &[segment(1, 508, 512)]));
    let fua = Request { flags: RequestFlags::FUA, ..request(Operation::Write, 9, 8, 1) };
    assert!(short(fua, &[segment(1, 0, 4096)]));
    let second = Request { segment_first: 1, ..read_request(0, 8, 1) };
    assert!(short(second, &[segment(1, 0, 1), segment(1, 0, 4096)]));

    assert!(!short(second, &[segment(1, 0, 4096)]), "past the end of the table");
    assert!(!short(read_request(0, 0, 1), &[segment(1, 0, 0)]), "nothing");
    assert!(!short(read_request(0, 8, 1), &[segment(1, 0, 4095)]));
    assert!(!short(read_request(0, 8, 1), &[segment(1, 2, 4096)]));
    assert!(!short(read_request(0, 8, 1), &[segment(100, 0, 4096)]), "out of reach");
    assert!(!short(read_request(0, 8, 2), &[segment(1, 0, 2048), segment(2, 0, 2048)]));
    assert!(!short(request(Operation::Compare, 0, 8, 1), &[segment(1, 0, 4096)]));
}

#[test]
fn each_operation_becomes_its_command() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    let data = [segment(1, 0, 4096)];
    let mut command = |operation, flags, data: &[Segment]| {
        let count = u16::try_from(data.len()).unwrap();
        harness.submit_for_command(Request { flags, ..request(operation, 40, 8, count) }, data)
    };
    let (none, all) = (RequestFlags::NONE, RequestFlags(7));

    let flush = command(Operation::Flush, none, &[]);
    assert_eq!(flush.with_cid(0), Command::new(0x00).with_nsid(NSID));

    let write = tenmil_wire::io::Write::parse(&command(Operation::Write, all, &data)).unwrap();
    assert_eq!((write.slba, write.nlb, write.fua, write.lr), (40, 7, true, true));
    let compare =
        tenmil_wire::io::Compare::parse(&command(Operation::Compare, none, &data)).unwrap();
    assert_eq!((compare.slba, compare.nlb, compare.fua, compare.lr), (40, 7, false, false));

    let zeroes =
        tenmil_wire::io::WriteZeroes::parse(&command(Operation::WriteZeroes, all, &[])).unwrap();
    assert_eq!((zeroes.slba, zeroes.nlb, zeroes.deac, zeroes.fua), (40, 7, true, true));
    let zeroes =
        tenmil_wire::io::WriteZeroes::parse(&command(Operation::WriteZeroes, none, &[])).unwrap();
    assert!(!zeroes.deac && !zeroes.fua);

    let verify = tenmil_wire::io::Verify::parse(&command(Operation::Verify, none, &[])).unwrap();
    assert_eq!((verify.nsid, verify.slba, verify.nlb), (NSID, 40, 7));
    let bad = command(Operation::WriteUncorrectable, all, &[]);
    let expected = Command::new(0x04).with_nsid(NSID).with_cdw10(40).with_cdw12(7);
    assert_eq!(bad.with_cid(0), expected, "it has no flags");
}

#[test]
fn deallocation_range_is_in_host_memory() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    let blocks = 1 << 30;
    let command =
        harness.submit_for_command(request(Operation::Deallocate, 1 << 40, blocks, 0), &[]);
    let expected = DatasetManagement { nsid: NSID, nr: 0, ad: true, idr: false, idw: false };
    assert_eq!(DatasetManagement::parse(&command), Ok(expected));
    let range = DatasetRange::from_bytes(&harness.bytes_at(command.prp1()));
    assert_eq!(range, DatasetRange::new(1 << 40, blocks));
}

#[test]
fn copy_source_ranges_are_in_host_memory() {
    let view = NamespaceView {
        protection: ProtectionChecks {
            action: true,
            reference_is_lba: true,
            ..ProtectionChecks::default()
        },
        blocks_max: BlocksMax { copy: 100, ..VIEW.blocks_max },
        ..VIEW
    };
    let mut harness = NamespaceQueueHarness::new(view, 8);
    let copy = Request { operand: 5000, ..request(Operation::Copy, 80, 250, 0) };
    assert!(harness.submit(copy, &[]));
    let mut seen = Vec::new();
    for command in harness.device.fetched.clone() {
        let fields = tenmil_wire::io::copy::Copy::parse(&command).unwrap();
        let range = CopyRange::from_bytes(&harness.bytes_at(command.prp1()));
        assert_eq!((fields.desfmt, fields.nr), (CopyFormat::SameNamespace, 0));
        assert_eq!(u64::from(range.elbt()), range.slba(), "the tag of the source");
        assert_eq!(u64::from(command.cdw14()), slba_of(&command), "the tag of the destination");
        assert_eq!(command.cdw12(), 8 << 26 | 8 << 12, "protection on both sides");
        seen.push((slba_of(&command), range.slba(), range.nlb()));
    }
    assert_eq!(seen, [(80, 5000, 99), (180, 5100, 99), (280, 5200, 49)]);
    assert_eq!(harness.complete_all().1, [(77, IoStatus::SUCCESS)]);
}

#[test]
fn protection_information_is_asked_for_in_every_command_that_moves_blocks() {
    let protection = ProtectionChecks {
        action: true,
        check_guard: true,
        check_application: false,
        check_reference: true,
        reference_is_lba: true,
    };
    let mut harness = NamespaceQueueHarness::new(NamespaceView { protection, ..VIEW }, 8);
    let lba = 0x12_3456_789a;
    for operation in [
        Operation::Read,
        Operation::Write,
        Operation::Compare,
        Operation::Verify,
        Operation::WriteZeroes,
    ] {
        let has_data = !matches!(operation, Operation::Verify | Operation::WriteZeroes);
        let request = request(operation, lba, 8, u16::from(has_data));
        let command = harness.submit_for_command(request, &[segment(1, 0, 4096)]);
        assert_eq!(
            (command.cdw12() >> 26, command.cdw14()),
            (0b1101, 0x3456_789a),
            "{operation:?}"
        );
    }
}

#[test]
fn invalid_request_completes_without_a_command() {
    let support =
        OperationSet::from_operations(&[Operation::Read, Operation::Write, Operation::Verify]);
    let mut harness = NamespaceQueueHarness::new(NamespaceView { support, ..VIEW }, 8);
    let page = [segment(1, 0, 4096)];
    let invalid = IoStatus::INVALID_FIELD;
    assert_eq!(harness.submit_for_rejection(read_request(0, 0, 1), &page), invalid, "no blocks");
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 9, 1), &page),
        invalid,
        "more blocks than bytes"
    );
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 7, 1), &page),
        invalid,
        "more bytes than blocks"
    );
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 8, 2), &page),
        invalid,
        "segments that are not there"
    );
    assert_eq!(harness.submit_for_rejection(read_request(0, 8, 0), &page), invalid, "no segments");
    let past = Request { segment_first: u32::MAX, ..read_request(0, 8, 1) };
    assert_eq!(harness.submit_for_rejection(past, &page), invalid);
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 9, 9), &[segment(1, 0, 512); 9]),
        invalid,
        "too scattered"
    );
    let last = request(Operation::Verify, u64::MAX, 2, 0);
    assert_eq!(harness.submit_for_rejection(last, &[]), invalid, "past the last number there is");
    let compare = request(Operation::Compare, 0, 8, 1);
    assert_eq!(harness.submit_for_rejection(compare, &page), IoStatus::INVALID_OPCODE);

    let far = [segment(100, 0, 4096)];
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 8, 1), &far),
        IoStatus::DATA_TRANSFER_ERROR
    );
    let odd = [segment(1, 2, 4096)];
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 8, 1), &odd),
        IoStatus(0x13),
        "PRP offset invalid"
    );
    let torn = [segment(1, 0, 300), segment(2, 0, 724)];
    assert_eq!(
        harness.submit_for_rejection(read_request(0, 2, 2), &torn),
        IoStatus(0x13),
        "a seam inside a block"
    );
}

#[test]
fn rejected_requests_are_bounded() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 4);
    let requests = vec![read_request(0, 0, 0); 10];
    assert_eq!(harness.namespace.submit(NOW, &requests, &[]), 3);
    assert_eq!(harness.poll().len(), 3);
    assert_eq!(harness.namespace.submit(NOW, &requests, &[]), 3);
}

#[test]
fn batch_is_accepted_up_to_the_free_slots() {
    let mut harness = NamespaceQueueHarness::new(VIEW, 8);
    let requests: Vec<_> =
        (0..20).map(|token| Request { token, ..read_request(8 * token, 8, 1) }).collect();
    let page = [segment(1, 0, 4096)];
    assert_eq!(harness.namespace.submit(NOW, &requests, &page), 7);
    assert_eq!(harness.namespace.submit(NOW, &requests[7..], &page), 0);
    harness.namespace.flush_submissions();
    assert_eq!(harness.device.fetch(), 7);
    let tokens: Vec<u64> = harness.complete_all().1.iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(harness.namespace.queue().stats().submission_doorbells, 1);
}

#[test]
fn dead_namespace_completes_requests_with_path_error() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut harness = NamespaceQueueHarness::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(harness.submit(Request { token: 1, ..read_request(0, 10, 1) }, &large));
    harness.controller.set_state(QueueState::Dead);
    assert_eq!(harness.poll(), [(1, IoStatus::ABORTED_BY_HOST)]);
    harness.device.reset();
    for blocks in [1, 10] {
        let status = harness
            .submit_for_rejection(read_request(0, blocks, 1), &[segment(1, 0, blocks * BLOCK)]);
        assert_eq!(status, IoStatus::PATH_ERROR);
    }
}

#[test]
fn limits_match_the_namespace() {
    let mut harness = NamespaceQueueHarness::new(NamespaceView { block_size: 4096, ..VIEW }, 8);
    let limits = harness.namespace.limits();
    assert_eq!((limits.block_size, limits.block_count, limits.depth_max), (4096, 1 << 20, 7));
    assert_eq!((limits.segments_max, limits.request_blocks_max), (8, 1 << 18));
    assert_eq!((limits.durability, limits.atomic_write_blocks), (Durability::VolatileCache, 8));
    harness.namespace.set_block_count(5);
    assert_eq!(harness.namespace.limits().block_count, 5);
}

#[test]
fn namespace_without_list_memory_is_not_created() {
    let dma = FakeDma::new(3);
    let memory = QueueMemory::allocate(&dma, 64, 64).unwrap();
    let device = FakeQueue::new(&dma, memory);
    let setup = QueueSetup {
        memory,
        submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
        completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
        link: create_link(1).1,
        timeout: Span::from_ms(800),
        techniques: FastPathOptions::default(),
    };
    let queue = QueuePair::new(&dma, setup);
    assert!(NamespaceQueue::new(queue, VIEW, QueueSizes::default()).is_none());
}
