use std::collections::BTreeMap;

use base::{
    Answers, Backend, Durability, Flags, Instant, Operation, Outcome, Random, RegionId, Request,
    Segment, Span, Support,
};
use wire::io::copy::{CopyFormat, CopyRange};
use wire::io::dataset::{DatasetManagement, DatasetRange};
use wire::{Command, Fuse, IoOpcode, Typed};

use super::{
    BlocksMax, CompareAndWrite, Metadata, NamespaceQueue, NamespaceView, NotSubmitted,
    ProtectionChecks, QueueSizes, Stretch,
};
use crate::data_pointer::{MemoryRefused, SglSupport};
use crate::fake::{FakeDma, FakeDoorbell, FakeQueue, addresses};
use crate::link::{ControllerEnd, Order, link};
use crate::queue_pair::{
    Injection, InjectionSide, QueueDoorbell, QueueMemory, QueuePair, QueueSetup,
};
use crate::techniques::Techniques;

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
    support: Support::of(&Operation::ALL),
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

struct World {
    namespace: NamespaceQueue<FakeDma, FakeDoorbell>,
    device: FakeQueue,
    controller: ControllerEnd,
    answers: Answers,
    dma: FakeDma,
}

impl World {
    fn new(view: NamespaceView, depth: u32) -> Self {
        let dma = FakeDma::new(64);
        let memory = QueueMemory::allocate(&dma, depth, depth).unwrap();
        let device = FakeQueue::new(&dma, memory);
        let (controller, queue_end) = link(1);
        let setup = QueueSetup {
            memory,
            submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
            completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
            link: queue_end,
            timeout: Span::from_ms(800),
            techniques: Techniques::default(),
        };
        let queue = QueuePair::new(&dma, setup);
        controller.give(Order::Run);
        let sizes = QueueSizes { parents: 2, segments: 8 };
        let namespace = NamespaceQueue::new(&dma, queue, view, sizes).unwrap();
        Self { namespace, device, controller, answers: Answers::with_capacity(64), dma }
    }

    fn submit(&mut self, request: Request, segments: &[Segment]) -> bool {
        let taken = self.namespace.submit(NOW, &[request], segments);
        self.namespace.flush();
        self.device.fetch();
        taken == 1
    }

    /// Submits, and returns the one command that came of it.
    fn command_of(&mut self, request: Request, segments: &[Segment]) -> Command {
        assert!(self.submit(request, segments));
        assert_eq!(self.device.fetched.len(), 1, "{request:?}");
        let command = self.device.complete_next(0);
        assert_eq!(self.poll(), [(request.token, Outcome::SUCCESS)]);
        command
    }

    /// Submits something that is to be refused, and returns how.
    fn refusal_of(&mut self, request: Request, segments: &[Segment]) -> Outcome {
        assert!(self.submit(request, segments));
        assert!(self.device.fetched.is_empty(), "{request:?} was sent");
        assert_eq!(self.namespace.wake_at(), Instant::default());
        let [(token, outcome)] = self.poll()[..] else { panic!("{request:?} was not answered") };
        assert_eq!(token, request.token);
        outcome
    }

    fn poll(&mut self) -> Vec<(u64, Outcome)> {
        self.namespace.poll(NOW, &mut self.answers);
        self.device.fetch();
        self.answers.drain().map(|answer| (answer.token, answer.outcome)).collect()
    }

    /// Completes everything until nothing more comes, and returns the commands and the answers.
    fn run_dry(&mut self) -> (Vec<Command>, Vec<(u64, Outcome)>) {
        let (mut commands, mut answers) = (Vec::new(), Vec::new());
        loop {
            while !self.device.fetched.is_empty() {
                commands.push(self.device.complete_next(0));
            }
            answers.extend(self.poll());
            if self.device.fetched.is_empty() && self.namespace.queue().in_flight() == 0 {
                return (commands, answers);
            }
        }
    }

    fn bytes<const N: usize>(&self, iova: u64) -> [u8; N] {
        self.dma.at(iova)
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
        flags: Flags::NONE,
    }
}

fn read(lba: u64, blocks: u32, segments: u16) -> Request {
    request(Operation::Read, lba, blocks, segments)
}

fn segment(region: u32, offset: u64, len_bytes: u32) -> Segment {
    Segment { region: RegionId(region), offset, len_bytes }
}

fn nlb(command: &Command) -> u32 {
    (command.cdw12() & 0xffff) + 1
}

fn slba(command: &Command) -> u64 {
    u64::from(command.cdw10()) | u64::from(command.cdw11()) << 32
}

#[test]
fn a_page_is_read_with_one_prp_entry() {
    let mut world = World::new(VIEW, 8);
    let command = world.command_of(read(0x1_2345_6789, 8, 1), &[segment(1, 8192, 4096)]);
    let expected =
        wire::io::Read { nsid: NSID, slba: 0x1_2345_6789, nlb: 7, ..wire::io::Read::default() };
    assert_eq!(wire::io::Read::parse(&command), Ok(expected));
    assert_eq!((command.prp1(), command.prp2()), ((2 << 32) + 8192, 0));
}

/// Both ways make the same command, bit by bit, wherever the short one makes any.
#[test]
fn the_short_way_and_the_long_way_make_the_same_command() {
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
        let mut world = World::new(view, 8);
        for _ in 0..3000 {
            let operation = if random.chance(1, 2) { Operation::Read } else { Operation::Write };
            let blocks = u32::try_from(random.below(20)).unwrap();
            let lba = random.below(1 << 40);
            let len_bytes = blocks * view.block_bytes() + u32::from(random.chance(1, 20));
            let segments = [segment(1, 4 * random.below(4096), len_bytes)];
            let flags = Flags(u8::try_from(random.below(8)).unwrap());
            let request = Request { flags, ..request(operation, lba, blocks, 1) };
            let Some(command) = world.namespace.short_command::<false>(&request, &segments) else {
                continue;
            };
            short += 1;
            let plainly = world.namespace.short_command::<true>(&request, &segments);
            assert!(!world.namespace.short_way.is_plain || plainly == Some(command));
            let builder = &mut world.namespace.builder;
            assert_eq!(builder.check(&request, &segments), Ok(()));
            let slowly = builder.next_command(0, &request, &segments, 0);
            assert_eq!(slowly, Ok((command, blocks)), "{view:?} {request:?}");
        }
    }
    assert!(short > 3000, "{short} of 15000 went the short way");
}

#[test]
fn the_short_way_serves_what_most_requests_are() {
    let world = World::new(NamespaceView { transfer_bytes_max: 65_536, ..VIEW }, 8);
    let short = |request: Request, segments: &[Segment]| {
        world.namespace.short_command::<true>(&request, segments).is_some()
    };
    assert!(short(read(0, 8, 1), &[segment(1, 0, 4096)]));
    assert!(short(read(0, 16, 1), &[segment(1, 4096, 8192)]));
    assert!(short(read(0, 1, 1), &[segment(1, 508, 512)]));
    let fua = Request { flags: Flags::FUA, ..request(Operation::Write, 9, 8, 1) };
    assert!(short(fua, &[segment(1, 0, 4096)]));
    let second = Request { segment_first: 1, ..read(0, 8, 1) };
    assert!(short(second, &[segment(1, 0, 1), segment(1, 0, 4096)]));

    assert!(!short(second, &[segment(1, 0, 4096)]), "past the end of the table");
    assert!(!short(read(0, 0, 1), &[segment(1, 0, 0)]), "nothing");
    assert!(!short(read(0, 8, 1), &[segment(1, 0, 4095)]));
    assert!(!short(read(0, 8, 1), &[segment(1, 2, 4096)]));
    assert!(!short(read(0, 8, 1), &[segment(100, 0, 4096)]), "out of reach");
    assert!(!short(read(0, 8, 2), &[segment(1, 0, 2048), segment(2, 0, 2048)]));
    assert!(!short(request(Operation::Compare, 0, 8, 1), &[segment(1, 0, 4096)]));
}

/// Checks the children of a request: in order, within the limits, and together exactly the blocks
/// and bytes that were asked for.
fn check_split(view: NamespaceView, request: Request, segments: &[Segment], depth: u32) {
    let mut world = World::new(view, depth);
    assert!(world.submit(request, segments));
    let all = addresses(segments);
    let boundary = u64::from(view.optimal_boundary_blocks);
    let (mut next, mut at) = (request.lba, 0);
    let mut answers = Vec::new();
    while next < request.lba + u64::from(request.blocks) {
        let command = *world.device.fetched.front().expect("a child is out");
        let (lba, blocks) = (slba(&command), nlb(&command));
        assert_eq!(lba, next);
        let end = lba + u64::from(blocks);
        let crosses = (lba + 1..end).any(|at| at.checked_rem(boundary) == Some(0));
        assert!(!crosses, "{lba}..{end} crosses a multiple of {boundary}");
        let len = blocks * view.block_bytes();
        assert!(view.transfer_bytes_max == 0 || len <= view.transfer_bytes_max);
        let found = world.dma.walk(&command, u64::from(len), 4096);
        assert_eq!(found, all[at..at + len as usize], "{request:?}");
        (next, at) = (end, at + len as usize);
        assert_eq!(answers, [], "not before the last child");
        world.device.complete_next(0);
        answers = world.poll();
    }
    assert_eq!(answers, [(request.token, Outcome::SUCCESS)]);
    assert_eq!((at, world.namespace.queue().in_flight()), (all.len(), 0));
}

#[test]
fn children_cover_their_request_exactly_and_keep_every_limit() {
    for transfer_blocks in [0, 1, 3, 8, 16] {
        for optimal_boundary_blocks in [0, 1, 6, 8] {
            let transfer_bytes_max = transfer_blocks * BLOCK;
            let view = NamespaceView { transfer_bytes_max, optimal_boundary_blocks, ..VIEW };
            for lba in [0, 5, 7, 8, 1 << 33] {
                for blocks in [1, 2, 7, 8, 9, 17, 40] {
                    let whole = [segment(1, 512, blocks * BLOCK)];
                    check_split(view, read(lba, blocks, 1), &whole, 4);
                    check_split(view, request(Operation::Write, lba, blocks, 1), &whole, 32);
                }
            }
        }
    }
}

#[test]
fn scattered_memory_is_split_where_prp_entries_cannot_go_on() {
    let parts = [
        segment(1, 0, 4096),
        segment(2, 4096, 8192),
        segment(3, 512, 1024),
        segment(4, 512, 3584),
        segment(4, 4096, 4096),
    ];
    let blocks = parts.iter().map(|part| part.len_bytes).sum::<u32>() / BLOCK;
    for sgl in [SglSupport::None, SglSupport::DwordAligned, SglSupport::Any] {
        for transfer_bytes_max in [0, 4096, 1536] {
            let view = NamespaceView { sgl, transfer_bytes_max, ..VIEW };
            for operation in [Operation::Read, Operation::Write, Operation::Compare] {
                check_split(view, request(operation, 9, blocks, 5), &parts, 8);
            }
        }
    }
}

#[test]
fn a_large_request_is_one_command_where_the_controller_allows() {
    let mut world = World::new(VIEW, 4);
    let blocks = (1 << 21) / BLOCK;
    let command = world.command_of(read(0, blocks, 1), &[segment(1, 4096, 1 << 21)]);
    assert_eq!(nlb(&command), blocks);
    let found = world.dma.walk(&command, 1 << 21, 4096);
    assert_eq!(found, addresses(&[segment(1, 4096, 1 << 21)]));
    check_split(VIEW, read(0, blocks + 8, 1), &[segment(1, 4096, (1 << 21) + 4096)], 4);
}

#[test]
fn a_slot_is_enough_for_a_request_of_many_children() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    check_split(view, read(0, 30, 1), &[segment(1, 0, 30 * BLOCK)], 2);
}

#[test]
fn each_operation_becomes_its_command() {
    let mut world = World::new(VIEW, 8);
    let data = [segment(1, 0, 4096)];
    let mut command = |operation, flags, data: &[Segment]| {
        let count = u16::try_from(data.len()).unwrap();
        world.command_of(Request { flags, ..request(operation, 40, 8, count) }, data)
    };
    let (none, all) = (Flags::NONE, Flags(7));

    let flush = command(Operation::Flush, none, &[]);
    assert_eq!(flush.with_cid(0), Command::new(0x00).with_nsid(NSID));

    let write = wire::io::Write::parse(&command(Operation::Write, all, &data)).unwrap();
    assert_eq!((write.slba, write.nlb, write.fua, write.lr), (40, 7, true, true));
    let compare = wire::io::Compare::parse(&command(Operation::Compare, none, &data)).unwrap();
    assert_eq!((compare.slba, compare.nlb, compare.fua, compare.lr), (40, 7, false, false));

    let zeroes = wire::io::WriteZeroes::parse(&command(Operation::WriteZeroes, all, &[])).unwrap();
    assert_eq!((zeroes.slba, zeroes.nlb, zeroes.deac, zeroes.fua), (40, 7, true, true));
    let zeroes = wire::io::WriteZeroes::parse(&command(Operation::WriteZeroes, none, &[])).unwrap();
    assert!(!zeroes.deac && !zeroes.fua);

    let verify = wire::io::Verify::parse(&command(Operation::Verify, none, &[])).unwrap();
    assert_eq!((verify.nsid, verify.slba, verify.nlb), (NSID, 40, 7));
    let bad = command(Operation::WriteUncorrectable, all, &[]);
    let expected = Command::new(0x04).with_nsid(NSID).with_cdw10(40).with_cdw12(7);
    assert_eq!(bad.with_cid(0), expected, "it has no flags");
}

#[test]
fn a_deallocation_brings_its_range_in_memory() {
    let mut world = World::new(VIEW, 8);
    let blocks = 1 << 30;
    let command = world.command_of(request(Operation::Deallocate, 1 << 40, blocks, 0), &[]);
    let expected = DatasetManagement { nsid: NSID, nr: 0, ad: true, idr: false, idw: false };
    assert_eq!(DatasetManagement::parse(&command), Ok(expected));
    let range = DatasetRange::from_bytes(&world.bytes(command.prp1()));
    assert_eq!(range, DatasetRange::new(1 << 40, blocks));
}

#[test]
fn a_copy_brings_its_source_in_memory() {
    let view = NamespaceView {
        protection: ProtectionChecks {
            action: true,
            reference_is_lba: true,
            ..ProtectionChecks::default()
        },
        blocks_max: BlocksMax { copy: 100, ..VIEW.blocks_max },
        ..VIEW
    };
    let mut world = World::new(view, 8);
    let copy = Request { operand: 5000, ..request(Operation::Copy, 80, 250, 0) };
    assert!(world.submit(copy, &[]));
    let mut seen = Vec::new();
    for command in world.device.fetched.clone() {
        let fields = wire::io::copy::Copy::parse(&command).unwrap();
        let range = CopyRange::from_bytes(&world.bytes(command.prp1()));
        assert_eq!((fields.desfmt, fields.nr), (CopyFormat::SameNamespace, 0));
        assert_eq!(u64::from(range.elbt()), range.slba(), "the tag of the source");
        assert_eq!(u64::from(command.cdw14()), slba(&command), "the tag of the destination");
        assert_eq!(command.cdw12(), 8 << 26 | 8 << 12, "protection on both sides");
        seen.push((slba(&command), range.slba(), range.nlb()));
    }
    assert_eq!(seen, [(80, 5000, 99), (180, 5100, 99), (280, 5200, 49)]);
    assert_eq!(world.run_dry().1, [(77, Outcome::SUCCESS)]);
}

#[test]
fn commands_without_data_are_split_at_their_own_limits() {
    let blocks_max = BlocksMax {
        write_zeroes: 10,
        verify: 20,
        write_uncorrectable: 30,
        deallocate: 40,
        copy: 50,
        compare_and_write: 0,
    };
    for (operation, limit) in [
        (Operation::WriteZeroes, 10),
        (Operation::Verify, 20),
        (Operation::WriteUncorrectable, 30),
        (Operation::Deallocate, 40),
        (Operation::Copy, 50),
    ] {
        for blocks in [1, limit - 1, limit, limit + 1, 3 * limit, 3 * limit + 1] {
            let mut world = World::new(NamespaceView { blocks_max, ..VIEW }, 4);
            assert!(world.submit(request(operation, 7, blocks, 0), &[]));
            let (commands, answers) = world.run_dry();
            assert_eq!(commands.len(), blocks.div_ceil(limit) as usize, "{operation:?} {blocks}");
            assert_eq!(answers, [(77, Outcome::SUCCESS)]);
        }
    }
    let mut world = World::new(VIEW, 8);
    assert!(world.submit(request(Operation::WriteZeroes, 0, 3 << 16, 0), &[]));
    let blocks: Vec<u32> = world.run_dry().0.iter().map(nlb).collect();
    assert_eq!(blocks, [1 << 16; 3], "what the field has room for is a limit as well");
}

#[test]
fn separate_metadata_goes_with_its_blocks() {
    let metadata = Metadata::Separate(8);
    let view = NamespaceView { metadata, transfer_bytes_max: 4 * BLOCK, ..VIEW };
    let mut world = World::new(view, 8);
    // Ten blocks; their metadata in two pieces of three and seven blocks.
    let segments = [segment(1, 0, 10 * BLOCK), segment(2, 64, 24), segment(3, 128, 56)];
    let with_metadata = Request { metadata_count: 2, ..read(100, 10, 1) };
    assert!(world.submit(with_metadata, &segments));
    let (commands, answers) = world.run_dry();
    let seen: Vec<_> =
        commands.iter().map(|command| (slba(command), nlb(command), command.mptr())).collect();
    let (second, third) = ((3 << 32) + 64, (4 << 32) + 128);
    assert_eq!(seen, [(100, 3, second), (103, 4, third), (107, 3, third + 32)]);
    assert_eq!(answers, [(77, Outcome::SUCCESS)]);

    assert_eq!(world.refusal_of(read(0, 10, 1), &segments), Outcome::INVALID_FIELD);
    let short = [segments[0], segments[1], segment(3, 128, 55)];
    assert_eq!(world.refusal_of(with_metadata, &short), Outcome::INVALID_FIELD);
    let odd = [segments[0], segment(2, 66, 80)];
    let with_odd = Request { metadata_count: 1, ..with_metadata };
    assert_eq!(world.refusal_of(with_odd, &odd), MemoryRefused::Alignment.outcome());
}

#[test]
fn interleaved_metadata_lies_behind_each_block() {
    let view = NamespaceView {
        metadata: Metadata::Interleaved(8),
        transfer_bytes_max: 2 * (BLOCK + 8),
        ..VIEW
    };
    check_split(view, read(0, 5, 1), &[segment(1, 0, 5 * (BLOCK + 8))], 4);
    assert_eq!(World::new(view, 4).namespace.limits().metadata_size, 0);
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
    let mut world = World::new(NamespaceView { protection, ..VIEW }, 8);
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
        let command = world.command_of(request, &[segment(1, 0, 4096)]);
        assert_eq!(
            (command.cdw12() >> 26, command.cdw14()),
            (0b1101, 0x3456_789a),
            "{operation:?}"
        );
    }
}

#[test]
fn a_request_that_makes_no_sense_is_answered_without_a_command() {
    let support = Support::of(&[Operation::Read, Operation::Write, Operation::Verify]);
    let mut world = World::new(NamespaceView { support, ..VIEW }, 8);
    let page = [segment(1, 0, 4096)];
    let invalid = Outcome::INVALID_FIELD;
    assert_eq!(world.refusal_of(read(0, 0, 1), &page), invalid, "no blocks");
    assert_eq!(world.refusal_of(read(0, 9, 1), &page), invalid, "more blocks than bytes");
    assert_eq!(world.refusal_of(read(0, 7, 1), &page), invalid, "more bytes than blocks");
    assert_eq!(world.refusal_of(read(0, 8, 2), &page), invalid, "segments that are not there");
    assert_eq!(world.refusal_of(read(0, 8, 0), &page), invalid, "no segments");
    let past = Request { segment_first: u32::MAX, ..read(0, 8, 1) };
    assert_eq!(world.refusal_of(past, &page), invalid);
    assert_eq!(world.refusal_of(read(0, 9, 9), &[segment(1, 0, 512); 9]), invalid, "too scattered");
    let last = request(Operation::Verify, u64::MAX, 2, 0);
    assert_eq!(world.refusal_of(last, &[]), invalid, "past the last number there is");
    let compare = request(Operation::Compare, 0, 8, 1);
    assert_eq!(world.refusal_of(compare, &page), Outcome::INVALID_OPCODE);

    let far = [segment(100, 0, 4096)];
    assert_eq!(world.refusal_of(read(0, 8, 1), &far), Outcome::DATA_TRANSFER_ERROR);
    let odd = [segment(1, 2, 4096)];
    assert_eq!(world.refusal_of(read(0, 8, 1), &odd), Outcome(0x13), "PRP offset invalid");
    let torn = [segment(1, 0, 300), segment(2, 0, 724)];
    assert_eq!(world.refusal_of(read(0, 2, 2), &torn), Outcome(0x13), "a seam inside a block");
}

#[test]
fn an_alignment_that_goes_wrong_half_way_ends_the_request_once() {
    let view = NamespaceView { transfer_bytes_max: 4096, ..VIEW };
    let mut world = World::new(view, 8);
    let segments = [segment(1, 0, 8192), segment(2, 2, 4096)];
    assert!(world.submit(read(0, 24, 2), &segments));
    let (commands, answers) = world.run_dry();
    assert_eq!((commands.len(), answers), (2, vec![(77, Outcome(0x13))]));
}

#[test]
fn refusals_are_bounded_like_everything_else() {
    let mut world = World::new(VIEW, 4);
    let requests = vec![read(0, 0, 0); 10];
    assert_eq!(world.namespace.submit(NOW, &requests, &[]), 3);
    assert_eq!(world.poll().len(), 3);
    assert_eq!(world.namespace.submit(NOW, &requests, &[]), 3);
}

#[test]
fn a_batch_is_taken_as_far_as_there_is_room_and_no_further() {
    let mut world = World::new(VIEW, 8);
    let requests: Vec<_> =
        (0..20).map(|token| Request { token, ..read(8 * token, 8, 1) }).collect();
    let page = [segment(1, 0, 4096)];
    assert_eq!(world.namespace.submit(NOW, &requests, &page), 7);
    assert_eq!(world.namespace.submit(NOW, &requests[7..], &page), 0);
    world.namespace.flush();
    assert_eq!(world.device.fetch(), 7);
    let tokens: Vec<u64> = world.run_dry().1.iter().map(|(token, _)| *token).collect();
    assert_eq!(tokens, [0, 1, 2, 3, 4, 5, 6]);
    assert_eq!(world.namespace.queue().stats().submission_doorbells, 1);
}

#[test]
fn a_third_large_request_waits_for_a_parent() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut world = World::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(world.submit(read(0, 10, 1), &large));
    assert!(!world.submit(read(10, 10, 1), &large), "all slots are taken");
    let mut taken = 1;
    let mut answers = Vec::new();
    for _ in 0..60 {
        if !world.device.fetched.is_empty() {
            world.device.complete_next(0);
        }
        answers.extend(world.poll());
        taken += usize::from(taken < 5 && world.submit(read(10, 10, 1), &large));
        assert!(taken <= answers.len() + 2, "two parents");
    }
    assert_eq!((taken, answers.len()), (5, 5));
}

#[test]
fn the_worst_child_decides_and_stops_the_others() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut world = World::new(view, 4);
    assert!(world.submit(read(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
    assert_eq!(world.device.fetched.len(), 3);
    world.device.complete_next(0);
    world.device.complete_next(0x281);
    assert_eq!(world.poll(), []);
    assert!(world.device.fetched.len() <= 2, "nothing was sent after the failure");
    let (_, answers) = world.run_dry();
    assert_eq!(answers, [(77, Outcome::UNRECOVERED_READ)]);
}

#[test]
fn a_fused_pair_is_answered_once_and_says_why_it_failed() {
    let (compare, write) = ([segment(1, 0, 4096)], [segment(2, 0, 4096)]);
    for (first, second, expected) in [
        (0, 0, Outcome::SUCCESS),
        (0x285, 0x09, Outcome::COMPARE_FAILURE),
        (0, 0x280, Outcome::WRITE_FAULT),
        (0x09, 0x280, Outcome::WRITE_FAULT),
    ] {
        let mut world = World::new(VIEW, 4);
        let blocks = Stretch { lba: 64, blocks: 8 };
        let flags = Flags::FUA;
        let pair = CompareAndWrite { blocks, compare: &compare, write: &write, flags };
        world.namespace.submit_compare_and_write(NOW, 5, pair).unwrap();
        world.namespace.flush();
        assert_eq!(world.device.fetch(), 2);
        let [one, two] = [0, 1].map(|index| world.device.fetched[index]);
        assert_eq!((one.opcode(), one.fuse(), one.prp1()), (0x05, Fuse::First, 2 << 32));
        assert_eq!((two.opcode(), two.fuse(), two.prp1()), (0x01, Fuse::Second, 3 << 32));
        assert_eq!((slba(&one), slba(&two), nlb(&one), nlb(&two)), (64, 64, 8, 8));
        world.device.complete_next(first);
        assert_eq!(world.poll(), []);
        world.device.complete_next(second);
        assert_eq!(world.poll(), [(5, expected)]);
    }
}

#[test]
fn a_fused_pair_is_refused_whole() {
    let mut world = World::new(VIEW, 4);
    let page = [segment(1, 0, 4096)];
    let fused = |world: &mut World, blocks, write: &[Segment]| {
        let (blocks, flags) = (Stretch { lba: 0, blocks }, Flags::NONE);
        let pair = CompareAndWrite { blocks, compare: &page, write, flags };
        world.namespace.submit_compare_and_write(NOW, 5, pair)
    };
    let invalid = NotSubmitted::Refused(Outcome::INVALID_FIELD);
    assert_eq!(fused(&mut world, 9, &page), Err(invalid), "above the limit");
    assert_eq!(fused(&mut world, 8, &[]), Err(invalid));
    assert_eq!(fused(&mut world, 8, &[segment(1, 2, 4096)]).map_err(|_| ()), Err(()));
    world.submit(read(0, 8, 1), &page);
    world.submit(read(0, 8, 1), &page);
    assert_eq!(fused(&mut world, 8, &page), Err(NotSubmitted::Full));
    assert_eq!(world.run_dry().0.len(), 2, "no half was sent");
    for _ in 0..3 {
        assert_eq!(fused(&mut world, 8, &page), Ok(()), "and no parent was lost");
        world.namespace.flush();
        world.device.fetch();
        assert_eq!(world.run_dry().1.len(), 1);
    }
}

#[test]
fn a_raw_command_goes_as_it_is() {
    let mut world = World::new(VIEW, 4);
    let command = Command::new(0x12).with_nsid(9).with_cdw10(1).with_cdw15(0xffff_ffff);
    let data = [segment(1, 0, 4096), segment(2, 0, 8192), segment(3, 0, 100)];
    let metadata = [segment(4, 8, 64)];
    world.namespace.submit_raw(NOW, 5, command, &data, &metadata, None).unwrap();
    world.namespace.flush();
    world.device.fetch();
    let sent = world.device.complete_next(0);
    assert_eq!(world.poll(), [(5, Outcome::SUCCESS)]);
    assert_eq!(world.dma.walk(&sent, 12_388, 4096), addresses(&data));
    assert_eq!(sent.mptr(), (5 << 32) + 8);
    assert_eq!((sent.nsid(), sent.cdw10(), sent.cdw15()), (9, 1, u32::MAX));

    let own_pointer = command.with_prp(0x1000, 0x2000);
    world.namespace.submit_raw(NOW, 6, own_pointer, &[], &[], None).unwrap();
    world.namespace.flush();
    world.device.fetch();
    let sent = world.device.complete_next(0);
    assert_eq!((sent.prp1(), sent.prp2(), sent.mptr()), (0x1000, 0x2000, 0));
}

#[test]
fn a_raw_command_that_cannot_be_sent_says_why() {
    let view = NamespaceView { transfer_bytes_max: 8192, ..VIEW };
    let mut world = World::new(view, 2);
    let command = Command::new(0x02);
    let raw = |world: &mut World, command, data: &[Segment], metadata: &[Segment]| {
        world.namespace.submit_raw(NOW, 1, command, data, metadata, None)
    };
    let misaligned = NotSubmitted::Memory(MemoryRefused::Alignment);
    let refused = [
        (raw(&mut world, command.with_fuse(Fuse::First), &[], &[]), NotSubmitted::Fused),
        (
            raw(&mut world, command, &[segment(1, 0, 8193)], &[]),
            NotSubmitted::TooLong { bytes_max: 8192 },
        ),
        (raw(&mut world, command, &[segment(1, 1, 512)], &[]), misaligned),
        (raw(&mut world, command, &[segment(1, 0, 512), segment(2, 0, 512)], &[]), misaligned),
        (raw(&mut world, command, &[], &[segment(1, 0, 8), segment(2, 0, 8)]), misaligned),
        (
            raw(&mut world, command, &[segment(100, 0, 512)], &[]),
            NotSubmitted::Memory(MemoryRefused::Unreachable),
        ),
    ];
    for (found, expected) in refused {
        assert_eq!(found, Err(expected));
        assert!(expected.to_string().starts_with("submit a command: "), "{expected}");
    }
    assert_eq!(raw(&mut world, command, &[], &[]), Ok(()));
    assert_eq!(raw(&mut world, command, &[], &[]), Err(NotSubmitted::Full));
    world.controller.give(Order::Dead);
    world.poll();
    assert_eq!(raw(&mut world, command, &[], &[]), Err(NotSubmitted::Dead));
}

#[test]
fn a_raw_command_has_its_own_deadline() {
    let mut world = World::new(VIEW, 4);
    let (ms, command) = (Span::from_ms(10), Command::new(0x12));
    world.poll();
    world.namespace.submit_raw(NOW, 1, command, &[], &[], Some(ms)).unwrap();
    let now = Instant { ns: 20_000_000 };
    world.namespace.poll(now, &mut world.answers);
    assert!(world.controller.next_overdue().is_some());
}

#[test]
fn a_reset_returns_split_requests_once_and_sends_the_untouched_ones_afterwards() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut world = World::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(world.submit(Request { token: 1, ..read(0, 10, 1) }, &large));
    world.device.complete_next(0);
    world.controller.give(Order::Freeze);
    assert_eq!(world.poll(), []);
    world.controller.give(Order::Release);
    assert_eq!(world.poll(), [(1, Outcome::ABORTED_BY_HOST)]);
    assert_eq!(world.poll(), []);
    world.device.reset();
    world.controller.give(Order::Run);
    assert!(world.submit(Request { token: 2, ..read(0, 10, 1) }, &large));
    assert_eq!(world.run_dry().1, [(2, Outcome::SUCCESS)]);
}

#[test]
fn a_dead_namespace_answers_everything_with_a_path_error() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    let mut world = World::new(view, 4);
    let large = [segment(1, 0, 10 * BLOCK)];
    assert!(world.submit(Request { token: 1, ..read(0, 10, 1) }, &large));
    world.controller.give(Order::Dead);
    assert_eq!(world.poll(), [(1, Outcome::ABORTED_BY_HOST)]);
    world.device.reset();
    for blocks in [1, 10] {
        let outcome = world.refusal_of(read(0, blocks, 1), &[segment(1, 0, blocks * BLOCK)]);
        assert_eq!(outcome, Outcome::PATH_ERROR);
    }
}

#[test]
fn an_injected_error_reaches_a_child_like_any_other() {
    let view = NamespaceView { transfer_bytes_max: BLOCK, ..VIEW };
    for side in [InjectionSide::Submission, InjectionSide::Completion] {
        let mut world = World::new(view, 4);
        let (opcode, outcome) = (IoOpcode::Read.code(), Outcome::UNRECOVERED_READ);
        world.namespace.queue_mut().inject(Injection { opcode, side, outcome, count: 1 });
        assert!(world.submit(read(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
        assert_eq!(world.run_dry().1, [(77, outcome)], "{side:?}");
        assert!(world.submit(read(0, 10, 1), &[segment(1, 0, 10 * BLOCK)]));
        assert_eq!(world.run_dry().1, [(77, Outcome::SUCCESS)]);
    }
}

/// Requests of all sizes, completed in any order, some with errors: each token once, and what
/// succeeded has covered its bytes.
#[test]
fn random_requests_come_back_once_each() {
    let view = NamespaceView {
        transfer_bytes_max: 4 * BLOCK,
        optimal_boundary_blocks: 6,
        sgl: SglSupport::DwordAligned,
        ..VIEW
    };
    for seed in 1..40 {
        let mut random = Random::new(seed);
        let mut world = World::new(view, 8);
        let mut owed = BTreeMap::new();
        for token in 0..400 {
            let blocks = 1 + u32::try_from(random.below(20)).unwrap();
            let lba = random.below(1000);
            let cut = 4 * u32::try_from(random.below(u64::from(blocks * BLOCK / 4))).unwrap();
            let segments = [segment(1, 0, cut), segment(2, 4, blocks * BLOCK - cut)];
            if world.submit(Request { token, ..read(lba, blocks, 2) }, &segments) {
                owed.insert(token, blocks);
            }
            while random.chance(2, 3) && !world.device.fetched.is_empty() {
                let count = world.device.fetched.len() as u64;
                world.device.fetched.swap(0, usize::try_from(random.below(count)).unwrap());
                world.device.complete_next(if random.chance(1, 10) { 0x281 } else { 0 });
            }
            for (token, _) in world.poll() {
                assert!(owed.remove(&token).is_some(), "seed {seed}: {token} came back twice");
            }
        }
        for (token, _) in world.run_dry().1 {
            assert!(owed.remove(&token).is_some(), "seed {seed}: {token} came back twice");
        }
        assert!(owed.is_empty(), "seed {seed}: {owed:?}");
        assert_eq!(world.namespace.queue().stats().nonsense, 0);
    }
}

#[test]
fn limits_say_what_the_namespace_is() {
    let mut world = World::new(NamespaceView { block_size: 4096, ..VIEW }, 8);
    let limits = world.namespace.limits();
    assert_eq!((limits.block_size, limits.block_count, limits.depth_max), (4096, 1 << 20, 7));
    assert_eq!((limits.segments_max, limits.request_blocks_max), (8, 1 << 18));
    assert_eq!((limits.durability, limits.atomic_write_blocks), (Durability::VolatileCache, 8));
    world.namespace.resize(5);
    assert_eq!(world.namespace.limits().block_count, 5);
}

#[test]
fn a_namespace_without_memory_for_its_lists_is_not_made() {
    let dma = FakeDma::new(3);
    let memory = QueueMemory::allocate(&dma, 64, 64).unwrap();
    let device = FakeQueue::new(&dma, memory);
    let setup = QueueSetup {
        memory,
        submission_doorbell: QueueDoorbell::Register(device.tail_doorbell.clone()),
        completion_doorbell: QueueDoorbell::Register(device.head_doorbell.clone()),
        link: link(1).1,
        timeout: Span::from_ms(800),
        techniques: Techniques::default(),
    };
    let queue = QueuePair::new(&dma, setup);
    assert!(NamespaceQueue::new(&dma, queue, VIEW, QueueSizes::default()).is_none());
}
