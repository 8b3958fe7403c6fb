//! Tests of an executor without rings: commands under tags, data in segments.

use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelGroup, Error, Instant, IoChannel, Limits, MediumGuard, MediumMemory,
    Operation, OperationSet, RegionId, RequestFlags, Segment, Span,
};
use tenmil_wire::{Command, Fuse, IoOpcode, Status};

use super::namespace_table::NamespaceTable;
use super::{
    CommandDataLocation, CommandTag, Executor, ExecutorConfig, ExecutorContext, SegmentMemory,
};
use crate::BouncePool;
use crate::controller::transport_interface::AdminResult;
use crate::executor::FusedArbiter;
use crate::fuzz::block_device::FakeDevice;
use crate::fuzz::fake_host::{BOUNCE, FakeRam, HOST};
use crate::io_stats::{IoStatsSample, IoStatsTable, QueueIoStats};
use crate::namespace::{
    CopyLimits, Namespace, NamespaceIdentity, NamespaceSnapshot, VersionedValue,
};
use crate::queue::QueueEvent;

const BLOCKS: u64 = 256;
const WRONG_LENGTH: Status = Status::DATA_SGL_LENGTH_INVALID.with_dnr();

struct ExecutorFixture {
    ram: Arc<FakeRam>,
    device: Arc<FakeDevice>,
    fused_arbiter: Arc<FusedArbiter>,
    executor: Executor<SegmentMemory>,
    io_stats: Arc<IoStatsTable>,
    now: Instant,
}

fn namespace(nsid: u32, device: &Arc<FakeDevice>) -> Namespace {
    Namespace {
        nsid,
        block_shift: 9,
        metadata_size: 0,
        block_count: BLOCKS,
        is_write_protected: false,
        denies_reservations: false,
        unavailable: None,
        reservation: None,
        identity: NamespaceIdentity::default(),
        copy: CopyLimits::DEFAULT,
        limits: device.limits(),
        device: device.clone(),
        cache: None,
    }
}

impl ExecutorFixture {
    fn new() -> Self {
        Self::with_device(|device| device)
    }

    /// An executor over namespaces 1 and 2, with two command contexts.
    fn with_device(change: impl FnOnce(FakeDevice) -> FakeDevice) -> Self {
        let ram = FakeRam::new(0x4_0000, 0x1_0000);
        let device = Arc::new(change(FakeDevice::new(&ram, BLOCKS)));
        let fused_arbiter = Arc::<FusedArbiter>::default();
        let io_stats = Arc::<IoStatsTable>::default();
        let queue = QueueIoStats { controller: io_stats.source("host", 3), qid: 1 };
        let executor = build_executor(&ram, &device, &fused_arbiter, Some(queue));
        Self { ram, device, fused_arbiter, executor, io_stats, now: Instant::default() }
    }

    fn begin_command(&mut self, id: u16, command: Command, segment: Segment) -> bool {
        let tag = CommandTag { stream: 0, id };
        self.executor.begin_command(self.now, tag, command, CommandDataLocation::Segment(segment))
    }

    /// Polls once. Returns what has completed: identifiers, and statuses of those of the slow path.
    fn poll_finished(&mut self) -> Vec<(u16, Status)> {
        self.now = self.now.after(Span::from_us(1));
        let mut ended = Vec::new();
        self.executor.begin_iteration(self.now);
        self.executor.retry_waiting(self.now);
        self.executor.submit_all_channels(self.now);
        self.executor.poll_fast_path(self.now, |id| ended.push((id, Status::SUCCESS)));
        let finished = self.executor.take_finished_commands();
        ended.extend(finished.iter().map(|command| (command.tag.id, command.status)));
        ended
    }

    /// Runs a command to its completion.
    fn run_command(&mut self, command: Command, segment: Segment) -> Status {
        assert!(self.begin_command(77, command, segment));
        for _ in 0..1000 {
            if let [ended] = self.poll_finished()[..] {
                assert_eq!(ended.0, 77);
                return ended.1;
            }
        }
        panic!("{command:?} does not complete");
    }

    /// Commands that begin as a run, of those in this order.
    fn count_begun_as_run(&mut self, commands: &[(Command, Segment)]) -> usize {
        let commands = (0..).zip(commands).map(|(id, (command, segment))| (id, command, *segment));
        self.executor.begin_batch();
        self.executor.begin_segment_commands(0, commands)
    }
}

fn build_executor(
    ram: &Arc<FakeRam>,
    device: &Arc<FakeDevice>,
    fused_arbiter: &Arc<FusedArbiter>,
    io_stats: Option<QueueIoStats>,
) -> Executor<SegmentMemory> {
    let mut namespaces = NamespaceSnapshot::new(4);
    namespaces.insert(Arc::new(namespace(1, device)));
    namespaces.insert(Arc::new(namespace(2, device)));
    let published = VersionedValue::new(Arc::new(namespaces));
    let bounce = Segment { region: BOUNCE, offset: 0, len_bytes: 4096 };
    let shared = ExecutorContext {
        fused_arbiter: fused_arbiter.clone(),
        is_write_through: Arc::default(),
        buffers: BouncePool::new(ram.clone(), vec![bounce]),
        io_stats,
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
    executor.add_command_stream();
    executor
}

fn data_segment(offset: u64, len_bytes: u32) -> Segment {
    Segment { region: HOST, offset: 0x1_0000 + offset, len_bytes }
}

/// A command whose data pointer must not be evaluated.
fn io_command(opcode: IoOpcode, nsid: u32, lba: u64, blocks: u32) -> Command {
    let mut command = Command::new(opcode.code()).with_nsid(nsid).with_prp(3, u64::MAX);
    command.0[5] = lba;
    command.with_cdw12(blocks - 1)
}

fn read_command(lba: u64, blocks: u32) -> Command {
    io_command(IoOpcode::Read, 1, lba, blocks)
}

fn write_command(lba: u64, blocks: u32) -> Command {
    io_command(IoOpcode::Write, 1, lba, blocks)
}

#[test]
fn data_written_from_a_segment_is_read_back() {
    let mut rig = ExecutorFixture::new();
    for (blocks, is_run) in [(1_u32, true), (8, true), (128, false)] {
        let len = blocks * 512;
        let [from, to] = [0x1_0000, 0x2_0000].map(|at: usize| at..at + len as usize);
        let bytes: Vec<u8> = (0..len).map(|at| (at * 7 + blocks).to_le_bytes()[0]).collect();
        rig.ram.host_bytes()[from].copy_from_slice(&bytes);
        if is_run {
            assert_eq!(
                rig.count_begun_as_run(&[(write_command(4, blocks), data_segment(0, len))]),
                1
            );
            assert_eq!(rig.poll_finished(), [(0, Status::SUCCESS)]);
        } else {
            assert_eq!(
                rig.run_command(write_command(4, blocks), data_segment(0, len)),
                Status::SUCCESS
            );
        }
        assert_eq!(
            rig.run_command(read_command(4, blocks), data_segment(0x1_0000, len)),
            Status::SUCCESS
        );
        assert!(rig.ram.host_bytes()[to] == bytes, "{blocks} blocks");
    }
}

#[test]
fn similar_commands_begin_as_one_run_and_complete_with_their_tags() {
    let mut rig = ExecutorFixture::new();
    let reads: Vec<_> =
        (0..5).map(|at| (read_command(at, 1), data_segment(at * 512, 512))).collect();
    assert_eq!(rig.count_begun_as_run(&reads), 5);
    assert_eq!(rig.executor.in_flight_count(), 5);
    let ended: Vec<u16> = rig.poll_finished().into_iter().map(|(id, _)| id).collect();
    assert_eq!(ended, [0, 1, 2, 3, 4]);
    assert_eq!((rig.executor.in_flight_count(), rig.device.contents().log.len()), (0, 5));
    assert_eq!(rig.executor.take_io_totals().read_commands, 5);
}

#[test]
fn every_command_is_counted_once_by_operation_namespace_and_latency() {
    let mut rig = ExecutorFixture::new();
    // A run of reads, then single commands of two sizes, in one iteration.
    let reads: Vec<_> =
        (0..5).map(|at| (read_command(at, 1), data_segment(at * 512, 512))).collect();
    assert_eq!(rig.count_begun_as_run(&reads), 5);
    assert!(rig.begin_command(6, write_command(4, 2), data_segment(0, 1024)));
    assert_eq!(rig.poll_finished().len(), 6);
    let flush = io_command(IoOpcode::Flush, 1, 0, 1);
    assert_eq!(rig.run_command(flush, Segment::default()), Status::SUCCESS);
    let beyond = read_command(BLOCKS, 1);
    assert_eq!(rig.run_command(beyond, data_segment(0, 512)), Status::LBA_OUT_OF_RANGE.with_dnr());
    assert_eq!(
        rig.run_command(io_command(IoOpcode::Read, 2, 0, 4), data_segment(0, 2048)),
        Status::SUCCESS
    );
    let unknown = Command::new(0x77).with_nsid(1);
    assert!(!rig.run_command(unknown, Segment::default()).is_success());
    let samples = rig.io_stats.samples();
    let [first, second] = &samples[..] else { panic!("{samples:?}") };
    assert_eq!((&*first.host, first.queue, first.nsid), ("host", Some((3, 1)), 1));
    assert_eq!((second.queue, second.nsid), (Some((3, 1)), 2));
    let counts = |sample: &IoStatsSample, operation| {
        let one = sample.stats.operation_stats(operation);
        assert_eq!(one.latency.count(), one.count);
        (one.count, one.bytes, one.errors)
    };
    assert_eq!(counts(first, Operation::Read), (5, 5 * 512, 1));
    assert_eq!(counts(first, Operation::Write), (1, 1024, 0));
    assert_eq!(counts(first, Operation::Flush), (1, 0, 0));
    assert_eq!(counts(second, Operation::Read), (1, 2048, 0));
    let by_status = first.stats.errors_by_status.clone().into_iter().collect::<Vec<_>>();
    assert_eq!(by_status, [(Status::LBA_OUT_OF_RANGE.0, 1)]);
    // What a stopped queue discards is not counted.
    assert!(rig.begin_command(1, write_command(4, 1), data_segment(0, 512)));
    rig.executor.stop(rig.now);
    rig.poll_finished();
    assert_eq!(counts(&rig.io_stats.samples()[0], Operation::Write), (1, 1024, 0));
}

#[test]
fn runs_of_different_kinds_and_sizes_in_one_poll_are_all_counted() {
    let mut rig = ExecutorFixture::new();
    let reads = [(read_command(0, 1), data_segment(0, 512)); 3];
    let large = [(read_command(8, 2), data_segment(4096, 1024)); 2];
    let writes = [(write_command(16, 1), data_segment(8192, 512)); 4];
    assert_eq!(rig.count_begun_as_run(&reads), 3);
    assert_eq!(rig.count_begun_as_run(&large), 2);
    assert_eq!(rig.count_begun_as_run(&writes), 4);
    assert_eq!(rig.poll_finished().len(), 9);
    let stats = &rig.io_stats.samples()[0].stats;
    let of = |operation| {
        let one = stats.operation_stats(operation);
        (one.count, one.bytes, one.latency.count())
    };
    assert_eq!(of(Operation::Read), (5, 3 * 512 + 2 * 1024, 5));
    assert_eq!(of(Operation::Write), (4, 4 * 512, 4));
}

#[test]
fn latency_is_the_time_between_the_iterations_of_start_and_completion() {
    let mut rig = ExecutorFixture::new();
    for us in [3_u64, 40, 2_000_000] {
        rig.executor.begin_iteration(rig.now);
        assert_eq!(rig.count_begun_as_run(&[(read_command(0, 1), data_segment(0, 512))]), 1);
        rig.executor.submit_all_channels(rig.now);
        rig.now = rig.now.after(Span::from_us(us - 1));
        assert_eq!(rig.poll_finished().len(), 1);
        let stats = &rig.io_stats.samples()[0].stats;
        let latency = &stats.operation_stats(Operation::Read).latency;
        let found = latency.max();
        assert!(found.abs_diff(us * 1000) < 256, "{found} ns, expected {us} µs");
        assert!(stats.busy >= Span::from_us(us), "{:?}", stats.busy);
    }
}

#[test]
fn fast_path_run_ends_before_a_different_command() {
    let first = (read_command(0, 1), data_segment(0, 512));
    let others = [
        (write_command(1, 1), data_segment(0, 512)),
        (read_command(1, 2), data_segment(0, 1024)),
        (read_command(1, 1), data_segment(0, 1024)),
        (read_command(1, 1), data_segment(0, 508)),
        (read_command(1, 1), Segment::default()),
        (read_command(BLOCKS, 1), data_segment(0, 512)),
        (io_command(IoOpcode::Read, 2, 1, 1), data_segment(0, 512)),
        (read_command(1, 1).with_fuse(Fuse::First), data_segment(0, 512)),
        (io_command(IoOpcode::Flush, 1, 0, 1), Segment::default()),
    ];
    for other in others {
        let mut rig = ExecutorFixture::new();
        assert_eq!(rig.count_begun_as_run(&[first, other, first]), 1, "{other:?}");
        assert_eq!(rig.poll_finished(), [(0, Status::SUCCESS)]);
    }
    // And no run begins with one that is refused.
    let refused =
        [(read_command(0, 2), data_segment(0, 512)), (read_command(0, 1), data_segment(0, 1024))];
    for command in refused {
        assert_eq!(ExecutorFixture::new().count_begun_as_run(&[command, first]), 0, "{command:?}");
    }
}

#[test]
fn data_length_mismatch_is_rejected_without_a_transfer() {
    let bare =
        OperationSet::from_operations(&[Operation::Read, Operation::Write, Operation::Flush]);
    for is_bare in [false, true] {
        let mut rig = ExecutorFixture::with_device(|device| match is_bare {
            true => device.with_limits(|limits| limits.operations = bare),
            false => device,
        });
        for opcode in [IoOpcode::Read, IoOpcode::Write, IoOpcode::Compare] {
            for len in [0, 508, 512, 1020, 1028, 2048] {
                let status = rig.run_command(io_command(opcode, 1, 0, 2), data_segment(0, len));
                assert_eq!(status, WRONG_LENGTH, "{opcode:?} with {len} bytes");
            }
        }
        assert!(rig.device.contents().log.is_empty());
        assert_eq!(
            rig.run_command(io_command(IoOpcode::Compare, 1, 0, 2), data_segment(0, 1024)),
            Status::SUCCESS
        );
    }
}

#[test]
fn truncated_command_parameters_are_rejected() {
    let mut rig = ExecutorFixture::new();
    let deallocate = Command::new(IoOpcode::DatasetManagement.code()).with_nsid(1);
    let deallocate = deallocate.with_cdw10(1).with_cdw11(4);
    assert_eq!(rig.run_command(deallocate, data_segment(0, 28)), WRONG_LENGTH);
    assert_eq!(rig.run_command(deallocate, Segment::default()), WRONG_LENGTH);
    assert_eq!(rig.run_command(deallocate, data_segment(0, 32)), Status::SUCCESS);
    assert_eq!(rig.run_command(deallocate, data_segment(0, 4096)), Status::SUCCESS);
}

#[test]
fn report_is_zero_padded_to_its_segment() {
    let mut rig = ExecutorFixture::new();
    rig.ram.host_bytes()[0x1_0000..0x1_0100].fill(0xee);
    let report = Command::new(IoOpcode::ReservationReport.code()).with_nsid(1).with_cdw10(5);
    assert!(rig.begin_command(3, report, data_segment(0, 0x80)));
    let Some(QueueEvent::Reservation { ticket, .. }) = rig.executor.next_event() else {
        panic!("it is for the controller")
    };
    rig.executor.complete_reservation_command(rig.now, ticket, AdminResult::OK, &[1; 20]);
    assert_eq!(rig.poll_finished(), [(3, Status::SUCCESS)]);
    let bytes = rig.ram.host_bytes()[0x1_0000..0x1_0100].to_vec();
    assert!(bytes[..20] == [1; 20] && bytes[20..0x80] == [0; 0x6c]);
    assert!(bytes[0x80..] == [0xee; 0x80], "and nothing else");
}

#[test]
fn command_waits_for_a_free_context() {
    let mut rig = ExecutorFixture::with_device(|device| device.with_random_delays(1));
    let long = (read_command(0, 128), data_segment(0, 64 << 10));
    assert!(rig.begin_command(1, long.0, long.1) && rig.begin_command(2, long.0, long.1));
    assert!(!rig.begin_command(3, long.0, long.1), "there are two");
    assert_eq!(rig.executor.in_flight_count(), 2, "it has left nothing");
    let mut ended = Vec::new();
    while ended.is_empty() {
        ended = rig.poll_finished();
    }
    assert!(rig.begin_command(3, long.0, long.1));
}

#[test]
fn fused_compare_and_write_is_exclusive() {
    let mut rig = ExecutorFixture::new();
    rig.ram.host_bytes()[0x1_0200..0x1_0400].fill(5);
    let compare = io_command(IoOpcode::Compare, 1, 9, 1).with_fuse(Fuse::First);
    let write = write_command(9, 1).with_fuse(Fuse::Second);
    assert!(rig.begin_command(1, compare, data_segment(0, 512)));
    assert!(!rig.executor.can_begin_run() && !rig.executor.has_started_fused_pair());
    assert!(rig.begin_command(2, write, data_segment(512, 512)));
    assert!(rig.executor.has_started_fused_pair());
    let mut ended = rig.poll_finished();
    ended.extend(rig.poll_finished());
    assert_eq!(ended, [(1, Status::SUCCESS), (2, Status::SUCCESS)]);
    assert!(rig.executor.can_begin_run() && !rig.executor.has_started_fused_pair());
    assert_eq!(rig.device.contents().bytes[9 * 512], 5);
    // A wrong length of one half fails both.
    assert!(
        rig.begin_command(1, compare, data_segment(0, 512))
            && rig.begin_command(2, write, data_segment(0, 1024))
    );
    let mut ended = rig.poll_finished();
    ended.extend(rig.poll_finished());
    assert!(ended.contains(&(2, WRONG_LENGTH)) || ended.contains(&(1, Status::COMPARE_FAILURE)));
}

#[test]
fn commands_wait_while_another_queue_has_exclusivity() {
    let mut rig = ExecutorFixture::with_device(|device| device.with_random_delays(3));
    let mut other = build_executor(&rig.ram, &rig.device, &rig.fused_arbiter, None);
    // The other queue waits for this one, which executes a command.
    assert!(rig.begin_command(1, read_command(0, 1), data_segment(0, 512)));
    for (id, opcode, fuse) in
        [(1, IoOpcode::Compare, Fuse::First), (2, IoOpcode::Write, Fuse::Second)]
    {
        let half = CommandDataLocation::Segment(data_segment(0, 512));
        let tag = CommandTag { stream: 0, id };
        assert!(other.begin_command(
            rig.now,
            tag,
            io_command(opcode, 1, 0, 1).with_fuse(fuse),
            half
        ));
    }
    assert!(rig.executor.is_exclusivity_held());
    let [here, there] = [1, 2].map(|nsid| io_command(IoOpcode::Flush, nsid, 0, 1));
    let none = Segment::default();
    rig.executor.bar_exclusive_namespace();
    assert!(rig.begin_command(2, here, none), "the request is only now detected");
    rig.executor.unbar_and_acknowledge_exclusivity();
    rig.executor.bar_exclusive_namespace();
    assert!(!rig.executor.can_begin_run() && !rig.begin_command(3, here, none));
    assert!(rig.begin_command(4, there, none));
    rig.executor.unbar_and_acknowledge_exclusivity();
    assert!(rig.begin_command(5, here, none), "nothing is barred outside of it");
}

#[test]
fn waiting_fused_half_can_be_aborted_and_an_executing_one_cannot() {
    let mut rig = ExecutorFixture::with_device(|device| device.with_random_delays(5));
    let compare = io_command(IoOpcode::Compare, 1, 9, 1).with_fuse(Fuse::First);
    assert!(rig.begin_command(1, compare, data_segment(0, 512)));
    assert!(rig.executor.try_abort_command(rig.now, CommandTag { stream: 0, id: 1 }));
    assert!(
        !rig.executor.try_abort_command(rig.now, CommandTag { stream: 0, id: 1 }),
        "it is gone"
    );
    assert_eq!(rig.poll_finished(), [(1, Status::ABORT_REQUESTED)]);
    assert_eq!(rig.count_begun_as_run(&[(read_command(0, 1), data_segment(0, 512))]), 1);
    rig.executor.submit_all_channels(rig.now);
    assert!(!rig.executor.try_abort_command(rig.now, CommandTag { stream: 0, id: 0 }));
    assert_eq!(rig.executor.in_flight_count(), 1);
}

/// An executor over a device with medium memory, and the guard of that memory.
fn with_medium_memory(
    change: impl FnOnce(FakeDevice) -> FakeDevice,
) -> (ExecutorFixture, MediumGuard) {
    let guard: MediumGuard = Arc::new(());
    let medium = MediumMemory { region: RegionId(77), offset: 0x100, guard: guard.clone() };
    (ExecutorFixture::with_device(|device| change(device.with_medium_memory(medium))), guard)
}

/// Flags of the requests of the device since the last call.
fn take_flags(rig: &ExecutorFixture) -> Vec<RequestFlags> {
    rig.device.contents().log.drain(..).map(|request| request.flags).collect()
}

const KIB_64: u32 = 128;

#[test]
fn large_read_completes_with_its_place_in_the_medium() {
    let (mut rig, guard) = with_medium_memory(|device| device);
    let large = (read_command(5, KIB_64), data_segment(0, 64 << 10));
    for (command, flags) in [
        (large, RequestFlags::NONE),
        (large, RequestFlags::IN_PLACE),
        ((read_command(5, 1), data_segment(0, 512)), RequestFlags::NONE),
        ((write_command(5, KIB_64), large.1), RequestFlags::NONE),
    ] {
        assert_eq!(rig.count_begun_as_run(&[command]), 1);
        rig.executor.submit_all_channels(rig.now);
        let mut fast = 0;
        rig.executor.poll_fast_path(rig.now, |_| fast += 1);
        let finished = rig.executor.take_finished_commands();
        assert_eq!(take_flags(&rig), [flags]);
        if flags == RequestFlags::IN_PLACE {
            let [finished] = &finished[..] else { panic!("{finished:?}") };
            let medium = finished.medium.as_ref().unwrap();
            assert_eq!((finished.status, finished.result, fast), (Status::SUCCESS, 0, 0));
            assert_eq!((medium.region, medium.offset), (RegionId(77), 0x100 + 5 * 512));
            assert!(Arc::ptr_eq(&medium.guard, &guard));
        } else {
            assert!(finished.is_empty() && fast == 1);
        }
        rig.executor.recycle_finished_list(finished);
        rig.executor.allow_in_place_reads();
    }
    // The job path moves the data.
    assert_eq!(rig.run_command(large.0, large.1), Status::SUCCESS);
    assert!(take_flags(&rig).iter().all(|flags| *flags == RequestFlags::NONE));
}

/// A request larger than those of the device is split, and one of an unlike block size is not.
#[test]
fn split_read_moves_its_data() {
    let (mut rig, _) = with_medium_memory(|device| {
        device.with_limits(|limits| limits.request_blocks_max = KIB_64 - 1)
    });
    rig.executor.allow_in_place_reads();
    let large = (read_command(0, KIB_64), data_segment(0, 64 << 10));
    assert_eq!(rig.count_begun_as_run(&[large]), 0);
    assert_eq!(rig.run_command(large.0, large.1), Status::SUCCESS);
    assert_eq!(take_flags(&rig), [RequestFlags::NONE; 2]);
}

#[test]
fn failed_or_stopped_in_place_read_has_no_result_and_no_medium() {
    let (mut rig, guard) = with_medium_memory(|device| device);
    rig.executor.allow_in_place_reads();
    rig.device.contents().uncorrectable.insert(6);
    let large = (read_command(5, KIB_64), data_segment(0, 64 << 10));
    let idle = Arc::strong_count(&guard);
    for is_stopping in [false, true] {
        if is_stopping {
            rig.device.contents().uncorrectable.clear();
        }
        assert_eq!(rig.count_begun_as_run(&[large]), 1);
        rig.executor.submit_all_channels(rig.now);
        if is_stopping {
            rig.executor.stop(rig.now);
        }
        rig.executor.poll_fast_path(rig.now, |_| panic!("it is not of the fast path"));
        let finished = rig.executor.take_finished_commands();
        assert_eq!(take_flags(&rig), [RequestFlags::IN_PLACE]);
        let [one] = &finished[..] else { panic!("{finished:?}") };
        assert_eq!((one.status.is_success(), one.result), (is_stopping, 0));
        assert_eq!(one.medium.is_some(), is_stopping, "discarded by the owner of a stopped one");
        rig.executor.recycle_finished_list(finished);
        assert_eq!(Arc::strong_count(&guard), idle, "nothing keeps it");
    }
    assert_eq!(rig.executor.in_flight_count(), 0);
}

#[test]
fn stopped_executor_completes_no_command_and_drains() {
    let mut rig = ExecutorFixture::with_device(|device| device.with_random_delays(7));
    let reads: Vec<_> =
        (0..4).map(|at| (read_command(at, 1), data_segment(at * 512, 512))).collect();
    assert_eq!(rig.count_begun_as_run(&reads), 4);
    rig.executor.submit_all_channels(rig.now);
    rig.executor.stop(rig.now);
    let mut completed = 0;
    for _ in 0..1000 {
        rig.executor.submit_all_channels(rig.now);
        rig.executor.poll_fast_path(rig.now, |_| completed += 1);
    }
    assert_eq!((completed, rig.executor.in_flight_count()), (0, 0));
}

/// A device that counts its channels in the group of each.
#[derive(Debug)]
struct GroupedDevice {
    below: Arc<FakeDevice>,
    channel: Arc<()>,
    counts: Mutex<Vec<usize>>,
}

impl BlockDevice for GroupedDevice {
    fn limits(&self) -> Limits {
        self.below.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let group = ChannelGroup::current().unwrap();
        group.add_resource(&self.channel);
        self.counts.lock().unwrap().push(group.resources::<()>().len());
        self.below.channel()
    }
}

#[test]
fn channels_of_a_table_belong_to_one_group() {
    let ram = FakeRam::new(0x4_0000, 0x1_0000);
    let below = Arc::new(FakeDevice::new(&ram, BLOCKS));
    let device = Arc::new(GroupedDevice {
        below: below.clone(),
        channel: Arc::new(()),
        counts: Mutex::default(),
    });
    let entry = |nsid| Arc::new(Namespace { device: device.clone(), ..namespace(nsid, &below) });
    let mut snapshot = NamespaceSnapshot::new(4);
    snapshot.insert(entry(1));
    snapshot.insert(entry(2));
    let mut table = NamespaceTable::new(4, None);
    assert_eq!(table.update(&snapshot), [""; 0]);
    snapshot.insert(entry(3));
    assert_eq!(table.update(&snapshot), [""; 0]);
    let mut other = NamespaceTable::new(4, None);
    assert_eq!(other.update(&snapshot), [""; 0]);
    assert_eq!(*device.counts.lock().unwrap(), [1, 2, 3, 1, 2, 3], "of two tables");
}
