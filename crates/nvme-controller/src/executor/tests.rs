//! Tests of an executor without rings: commands under tags, data in segments.

use std::sync::Arc;

use tenmil_base::{BlockDevice, Instant, Operation, OperationSet, Segment, Span};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::{CommandData, Executor, ExecutorConfig, ExecutorContext, SegmentMemory, Tag};
use crate::BouncePool;
use crate::controller::interface::AdminResult;
use crate::executor::FusedArbiter;
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::host::{BOUNCE, HOST, Ram};
use crate::namespace::{CopyLimits, Identity, Namespace, Namespaces, Versioned};
use crate::queue::QueueEvent;

const BLOCKS: u64 = 256;
const WRONG_LENGTH: Status = Status::DATA_SGL_LENGTH_INVALID.with_dnr();

struct Rig {
    ram: Arc<Ram>,
    device: Arc<FakeDevice>,
    fused_arbiter: Arc<FusedArbiter>,
    executor: Executor<SegmentMemory>,
    now: Instant,
}

fn namespace(nsid: u32, device: &Arc<FakeDevice>) -> Namespace {
    Namespace {
        nsid,
        block_shift: 9,
        metadata_size: 0,
        block_count: BLOCKS,
        is_write_protected: false,
        unavailable: None,
        reservation: None,
        identity: Identity::default(),
        copy: CopyLimits::DEFAULT,
        limits: device.limits(),
        device: device.clone(),
        cache: None,
    }
}

impl Rig {
    fn new() -> Self {
        Self::with(|device| device)
    }

    /// An executor over namespaces 1 and 2, with two command contexts.
    fn with(change: impl FnOnce(FakeDevice) -> FakeDevice) -> Self {
        let ram = Ram::new(0x4_0000, 0x1_0000);
        let device = Arc::new(change(FakeDevice::new(&ram, BLOCKS)));
        let fused_arbiter = Arc::<FusedArbiter>::default();
        let executor = executor(&ram, &device, &fused_arbiter);
        Self { ram, device, fused_arbiter, executor, now: Instant::default() }
    }

    fn begin(&mut self, id: u16, command: Command, segment: Segment) -> bool {
        let tag = Tag { stream: 0, id };
        self.executor.begin(self.now, tag, command, CommandData::Segment(segment))
    }

    /// Polls once. Returns what has completed: identifiers, and statuses of those of the slow path.
    fn poll(&mut self) -> Vec<(u16, Status)> {
        self.now = self.now.after(Span::from_us(1));
        let mut ended = Vec::new();
        self.executor.begin_iteration(self.now);
        self.executor.retry_waiting(self.now);
        self.executor.submit(self.now);
        self.executor.poll_each(self.now, |id, _| ended.push((id, Status::SUCCESS)));
        let finished = self.executor.take_finished();
        ended.extend(finished.iter().map(|command| (command.tag.id, command.status)));
        ended
    }

    /// Runs a command to its completion.
    fn run(&mut self, command: Command, segment: Segment) -> Status {
        assert!(self.begin(77, command, segment));
        for _ in 0..1000 {
            if let [ended] = self.poll()[..] {
                assert_eq!(ended.0, 77);
                return ended.1;
            }
        }
        panic!("{command:?} does not complete");
    }

    /// Commands that begin as a run, of those in this order.
    fn run_of(&mut self, commands: &[(Command, Segment)]) -> usize {
        let commands = (0..).zip(commands).map(|(id, (command, segment))| (id, command, *segment));
        self.executor.open();
        self.executor.begin_segments(0, commands)
    }
}

fn executor(
    ram: &Arc<Ram>,
    device: &Arc<FakeDevice>,
    fused_arbiter: &Arc<FusedArbiter>,
) -> Executor<SegmentMemory> {
    let mut namespaces = Namespaces::new(4);
    namespaces.insert(Arc::new(namespace(1, device)));
    namespaces.insert(Arc::new(namespace(2, device)));
    let published = Versioned::new(Arc::new(namespaces));
    let bounce = Segment { region: BOUNCE, offset: 0, len_bytes: 4096 };
    let shared = ExecutorContext {
        fused_arbiter: fused_arbiter.clone(),
        is_write_through: Arc::default(),
        buffers: BouncePool::new(ram.clone(), vec![bounce]),
    };
    let config = ExecutorConfig {
        page_shift: 12,
        transfer_bytes_max: 64 << 10,
        in_flight_max: 16,
        contexts_max: 2,
    };
    let whole = Segment { region: HOST, offset: 0x1_0000, len_bytes: 0x2_0000 };
    let memory = SegmentMemory::new(ram.clone(), whole);
    let mut executor = Executor::new(memory, &config, shared, published.reader());
    executor.add_stream();
    executor
}

fn data(offset: u64, len_bytes: u32) -> Segment {
    Segment { region: HOST, offset: 0x1_0000 + offset, len_bytes }
}

/// A command whose data pointer must not be evaluated.
fn io(opcode: IoOpcode, nsid: u32, lba: u64, blocks: u32) -> Command {
    let mut command = Command::new(opcode.code()).with_nsid(nsid).with_prp(3, u64::MAX);
    command.0[5] = lba;
    command.with_cdw12(blocks - 1)
}

fn read(lba: u64, blocks: u32) -> Command {
    io(IoOpcode::Read, 1, lba, blocks)
}

fn write(lba: u64, blocks: u32) -> Command {
    io(IoOpcode::Write, 1, lba, blocks)
}

#[test]
fn what_was_written_from_a_segment_is_read_into_another() {
    let mut rig = Rig::new();
    for (blocks, is_run) in [(1_u32, true), (8, true), (128, false)] {
        let len = blocks * 512;
        let [from, to] = [0x1_0000, 0x2_0000].map(|at: usize| at..at + len as usize);
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + blocks).to_le_bytes()[0]).collect();
        rig.ram.host()[from].copy_from_slice(&bytes);
        if is_run {
            assert_eq!(rig.run_of(&[(write(4, blocks), data(0, len))]), 1);
            assert_eq!(rig.poll(), [(0, Status::SUCCESS)]);
        } else {
            assert_eq!(rig.run(write(4, blocks), data(0, len)), Status::SUCCESS);
        }
        assert_eq!(rig.run(read(4, blocks), data(0x1_0000, len)), Status::SUCCESS);
        assert!(rig.ram.host()[to] == bytes, "{blocks} blocks");
    }
}

#[test]
fn commands_alike_begin_together_and_end_under_their_own_tags() {
    let mut rig = Rig::new();
    let reads: Vec<_> = (0..5).map(|at| (read(at, 1), data(at * 512, 512))).collect();
    assert_eq!(rig.run_of(&reads), 5);
    assert_eq!(rig.executor.taken(), 5);
    let ended: Vec<u16> = rig.poll().into_iter().map(|(id, _)| id).collect();
    assert_eq!(ended, [0, 1, 2, 3, 4]);
    assert_eq!((rig.executor.taken(), rig.device.blocks().log.len()), (0, 5));
    assert_eq!(rig.executor.take_traffic(rig.now).read_commands, 5);
}

#[test]
fn a_run_ends_before_a_command_of_another_kind() {
    let first = (read(0, 1), data(0, 512));
    let others = [
        (write(1, 1), data(0, 512)),
        (read(1, 2), data(0, 1024)),
        (read(1, 1), data(0, 1024)),
        (read(1, 1), data(0, 508)),
        (read(1, 1), Segment::default()),
        (read(BLOCKS, 1), data(0, 512)),
        (io(IoOpcode::Read, 2, 1, 1), data(0, 512)),
        (read(1, 1).with_fuse(Fuse::First), data(0, 512)),
        (io(IoOpcode::Flush, 1, 0, 1), Segment::default()),
    ];
    for other in others {
        let mut rig = Rig::new();
        assert_eq!(rig.run_of(&[first, other, first]), 1, "{other:?}");
        assert_eq!(rig.poll(), [(0, Status::SUCCESS)]);
    }
    // And no run begins with one that is refused.
    let refused = [(read(0, 2), data(0, 512)), (read(0, 1), data(0, 1024))];
    for command in refused {
        assert_eq!(Rig::new().run_of(&[command, first]), 0, "{command:?}");
    }
}

#[test]
fn data_of_another_length_than_the_blocks_are_refused_and_nothing_is_transferred() {
    let bare = OperationSet::of(&[Operation::Read, Operation::Write, Operation::Flush]);
    for is_bare in [false, true] {
        let mut rig = Rig::with(|device| match is_bare {
            true => device.limited(|limits| limits.operations = bare),
            false => device,
        });
        for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare] {
            for len in [0, 508, 512, 1020, 1028, 2048] {
                let status = rig.run(io(opcode, 1, 0, 2), data(0, len));
                assert_eq!(status, WRONG_LENGTH, "{opcode:?} with {len} bytes");
            }
        }
        assert!(rig.device.blocks().log.is_empty());
        assert_eq!(rig.run(io(IoOpcode::Compare, 1, 0, 2), data(0, 1024)), Status::SUCCESS);
    }
}

#[test]
fn parameters_may_be_followed_by_more_and_must_not_be_cut_off() {
    let mut rig = Rig::new();
    let deallocate = Command::new(IoOpcode::DatasetManagement.code()).with_nsid(1);
    let deallocate = deallocate.with_cdw10(1).with_cdw11(4);
    assert_eq!(rig.run(deallocate, data(0, 28)), WRONG_LENGTH);
    assert_eq!(rig.run(deallocate, Segment::default()), WRONG_LENGTH);
    assert_eq!(rig.run(deallocate, data(0, 32)), Status::SUCCESS);
    assert_eq!(rig.run(deallocate, data(0, 4096)), Status::SUCCESS);
}

#[test]
fn a_report_fills_the_rest_of_its_segment_with_zeroes() {
    let mut rig = Rig::new();
    rig.ram.host()[0x1_0000..0x1_0100].fill(0xee);
    let report = Command::new(IoOpcode::ReservationReport.code()).with_nsid(1).with_cdw10(5);
    assert!(rig.begin(3, report, data(0, 0x80)));
    let Some(QueueEvent::Reservation { ticket, .. }) = rig.executor.next_event() else {
        panic!("it is for the controller")
    };
    rig.executor.complete_reservation(rig.now, ticket, AdminResult::OK, &[1; 20]);
    assert_eq!(rig.poll(), [(3, Status::SUCCESS)]);
    let bytes = rig.ram.host()[0x1_0000..0x1_0100].to_vec();
    assert!(bytes[..20] == [1; 20] && bytes[20..0x80] == [0; 0x6c]);
    assert!(bytes[0x80..] == [0xee; 0x80], "and nothing else");
}

#[test]
fn a_command_that_finds_no_context_is_refused_until_one_is_free() {
    let mut rig = Rig::with(|device| device.later(1));
    let long = (read(0, 128), data(0, 64 << 10));
    assert!(rig.begin(1, long.0, long.1) && rig.begin(2, long.0, long.1));
    assert!(!rig.begin(3, long.0, long.1), "there are two");
    assert_eq!(rig.executor.taken(), 2, "it has left nothing");
    let mut ended = Vec::new();
    while ended.is_empty() {
        ended = rig.poll();
    }
    assert!(rig.begin(3, long.0, long.1));
}

#[test]
fn a_fused_pair_compares_and_writes_segments_and_nothing_begins_meanwhile() {
    let mut rig = Rig::new();
    rig.ram.host()[0x1_0200..0x1_0400].fill(5);
    let compare = io(IoOpcode::Compare, 1, 9, 1).with_fuse(Fuse::First);
    let write = write(9, 1).with_fuse(Fuse::Second);
    assert!(rig.begin(1, compare, data(0, 512)));
    assert!(!rig.executor.may_run() && !rig.executor.has_pair());
    assert!(rig.begin(2, write, data(512, 512)));
    assert!(rig.executor.has_pair());
    let mut ended = rig.poll();
    ended.extend(rig.poll());
    assert_eq!(ended, [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert!(rig.executor.may_run() && !rig.executor.has_pair());
    assert_eq!(rig.device.blocks().bytes[9 * 512], 5);
    // A wrong length of one half fails both.
    assert!(rig.begin(1, compare, data(0, 512)) && rig.begin(2, write, data(0, 1024)));
    let mut ended = rig.poll();
    ended.extend(rig.poll());
    assert!(ended.contains(&(2, WRONG_LENGTH)) || ended.contains(&(1, Status::COMPARE_FAILURE)));
}

#[test]
fn commands_of_a_namespace_that_another_queue_holds_do_not_begin() {
    let mut rig = Rig::with(|device| device.later(3));
    let mut other = executor(&rig.ram, &rig.device, &rig.fused_arbiter);
    // The other queue waits for this one, which executes a command.
    assert!(rig.begin(1, read(0, 1), data(0, 512)));
    for (id, opcode, fuse) in
        [(1, IoOpcode::Compare, Fuse::First), (2, IoOpcode::Write, Fuse::Second)]
    {
        let half = CommandData::Segment(data(0, 512));
        let tag = Tag { stream: 0, id };
        assert!(other.begin(rig.now, tag, io(opcode, 1, 0, 1).with_fuse(fuse), half));
    }
    assert!(rig.executor.is_exclusive());
    let [here, there] = [1, 2].map(|nsid| io(IoOpcode::Flush, nsid, 0, 1));
    let none = Segment::default();
    rig.executor.begin_exclusive();
    assert!(rig.begin(2, here, none), "the request is only now detected");
    rig.executor.end_exclusive();
    rig.executor.begin_exclusive();
    assert!(!rig.executor.may_run() && !rig.begin(3, here, none));
    assert!(rig.begin(4, there, none));
    rig.executor.end_exclusive();
    assert!(rig.begin(5, here, none), "nothing is barred outside of it");
}

#[test]
fn an_aborted_half_finishes_and_one_that_executes_does_not() {
    let mut rig = Rig::with(|device| device.later(5));
    let compare = io(IoOpcode::Compare, 1, 9, 1).with_fuse(Fuse::First);
    assert!(rig.begin(1, compare, data(0, 512)));
    assert!(rig.executor.abort(rig.now, Tag { stream: 0, id: 1 }));
    assert!(!rig.executor.abort(rig.now, Tag { stream: 0, id: 1 }), "it is gone");
    assert_eq!(rig.poll(), [(1, Status::ABORT_REQUESTED)]);
    assert_eq!(rig.run_of(&[(read(0, 1), data(0, 512))]), 1);
    rig.executor.submit(rig.now);
    assert!(!rig.executor.abort(rig.now, Tag { stream: 0, id: 0 }));
    assert_eq!(rig.executor.taken(), 1);
}

#[test]
fn a_stopped_executor_completes_no_command_and_drains() {
    let mut rig = Rig::with(|device| device.later(7));
    let reads: Vec<_> = (0..4).map(|at| (read(at, 1), data(at * 512, 512))).collect();
    assert_eq!(rig.run_of(&reads), 4);
    rig.executor.submit(rig.now);
    rig.executor.stop(rig.now);
    let mut completed = 0;
    for _ in 0..1000 {
        rig.executor.submit(rig.now);
        rig.executor.poll_each(rig.now, |_, _| completed += 1);
    }
    assert_eq!((completed, rig.executor.taken()), (0, 0));
}
