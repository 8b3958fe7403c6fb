//! Writes of an association that has ended, and later writes to the same blocks.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Operation, Request,
    Segment, Span,
};
use tenmil_block::{Bdev, BdevOptions, Claim};
use tenmil_drivers::RamDevice;
use tenmil_linux::Clock;
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, Disconnect};
use tenmil_wire::register::offset;
use tenmil_wire::{Command, IoOpcode, Status, TypedCommand};

use super::resets::{execute_reset, identify_for_reset, submit_reset};
use super::test_target::{
    BLOCKS, ENABLED, TestTarget, admin_config, admin_connect, connect_data, read_or_write_command,
    service_limits,
};
use crate::tcp::{InjectedBugs, ServiceLimits, TargetEvent};

pub(super) const OLD: [u8; 4096] = [0xaa; 4096];
pub(super) const NEW: [u8; 4096] = [0xbb; 4096];

/// RAM device that starts its first write late.
struct LateWriteDevice {
    ram: RamDevice,
    state: Arc<AtomicU32>,
}

struct LateWriteChannel {
    channel: Box<dyn IoChannel>,
    state: Arc<AtomicU32>,
    late: Option<(Request, Segment)>,
}

/// State of the first write: not submitted, delayed, released.
const AWAITED: u32 = 0;
pub(super) const HELD: u32 = 1;
pub(super) const LET_GO: u32 = 2;

impl BlockDevice for LateWriteDevice {
    fn limits(&self) -> tenmil_base::Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (channel, state) = (self.ram.channel()?, Arc::clone(&self.state));
        Ok(Box::new(LateWriteChannel { channel, state, late: None }))
    }
}

impl IoChannel for LateWriteChannel {
    fn limits(&self) -> &tenmil_base::Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let is_first = |request: &Request| request.operation == Operation::Write;
        if self.state.load(Ordering::Relaxed) != AWAITED || !requests.iter().any(is_first) {
            return self.channel.submit(now, requests, segments);
        }
        assert_eq!((requests.len(), requests[0].segment_count), (1, 1));
        self.late = Some((requests[0], segments[requests[0].segment_first as usize]));
        self.state.store(HELD, Ordering::Relaxed);
        1
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        if self.state.load(Ordering::Relaxed) == LET_GO
            && let Some((request, segment)) = self.late.take()
        {
            let request = Request { segment_first: 0, ..request };
            assert_eq!(self.channel.submit(now, &[request], &[segment]), 1);
        }
        self.channel.poll(now, answers)
    }
}

impl ChannelWakeup for LateWriteChannel {}

/// Service with one device that starts its first write late, as namespaces 1 and 2.
pub(super) fn target_with_late_writes(injected_bugs: InjectedBugs) -> (TestTarget, Arc<AtomicU32>) {
    let mut subsystem = None;
    let rig =
        TestTarget::with_options(ServiceLimits { injected_bugs, ..service_limits() }, |config| {
            subsystem = Some(config.subsystem.clone());
            config
        });
    let subsystem = subsystem.unwrap();
    assert!(subsystem.remove_namespace(1));
    let state = Arc::new(AtomicU32::new(AWAITED));
    let ram = RamDevice::new(&rig.regions, 512, BLOCKS).unwrap();
    let lagging = LateWriteDevice { ram, state: Arc::clone(&state) };
    let options = BdevOptions::new(Clock::on_kernel_clock(), 1);
    let device = Bdev::new("disk", Arc::new(lagging), options).unwrap();
    let descriptor: Arc<dyn BlockDevice> = Arc::new(device.open(Claim::WriteOnce, "test").unwrap());
    for nsid in [1, 2] {
        let config = NamespaceConfig::new(Arc::clone(&descriptor));
        subsystem.add_namespace(NamespaceConfig { nsid: Some(nsid), ..config }).unwrap();
    }
    (rig, state)
}

pub(super) fn write_command() -> Command {
    read_or_write_command(IoOpcode::Write.code(), 0, 8)
}

pub(super) fn read_block(rig: &mut TestTarget, io: usize) -> Vec<u8> {
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let (completion, bytes) = rig.execute_command(io, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    bytes
}

/// Ends an association or one of its queues while a write is in the device; returns the controller
/// that remains.
type EndAction = fn(&mut TestTarget, admin: usize, io: usize, cntlid: u16) -> Option<u16>;

const ENDS: [(&str, EndAction); 6] = [
    ("both connections", |rig, admin, io, _| {
        (rig.lines[admin].pipe, rig.lines[io].pipe) = (None, None);
        None
    }),
    ("the admin connection", |rig, admin, _, _| {
        rig.lines[admin].pipe = None;
        None
    }),
    ("the queue's connection", |rig, _, io, cntlid| {
        rig.lines[io].pipe = None;
        Some(cntlid)
    }),
    ("Disconnect", |rig, _, io, cntlid| {
        rig.lines[io].submit(&Disconnect::default().to_command(), DataDirection::None, &[]);
        Some(cntlid)
    }),
    ("a reset", |rig, admin, _, _| {
        rig.set_property(admin, offset::CC, 0);
        None
    }),
    ("a keep-alive time-out", |rig, _, _, _| {
        rig.advance_time(Span::from_secs(1));
        rig.advance_time(Span::from_secs(1));
        rig.advance_time(Span::from_secs(1));
        None
    }),
];

/// Data on the device after a host writes, its association ends as given, and another host writes
/// the same blocks.
fn device_data_after(bugs: InjectedBugs, name: &str, end: EndAction, host: Option<u8>) -> Vec<u8> {
    let (mut rig, medium) = target_with_late_writes(bugs);
    let admin = rig.open_connection(admin_config());
    let connect = Connect { kato: 1000, ..admin_connect() };
    let completion = rig.execute_connect(admin, &connect, &connect_data(CNTLID_DYNAMIC));
    let cntlid = u16::try_from(completion.dw0()).unwrap();
    rig.set_property(admin, offset::CC, ENABLED);
    let old = rig.connect_io_queue(cntlid, 1);
    rig.lines[old].submit(&write_command(), DataDirection::FromHost(4096), &OLD);
    rig.run_until_idle();
    assert_eq!(medium.load(Ordering::Relaxed), HELD, "{name}");
    let continues = end(&mut rig, admin, old, cntlid);
    rig.run_until_idle();
    let new = match (host, continues) {
        (Some(number), _) => rig.connect_host_with_io_queue(number).1,
        (None, Some(cntlid)) => rig.connect_io_queue(cntlid, 2),
        (None, None) => {
            let (_, cntlid) = rig.connect_admin_queue();
            rig.connect_io_queue(cntlid, 1)
        }
    };
    let other = write_command().with_nsid(2);
    let tags = [write_command(), other]
        .map(|it| rig.lines[new].submit(&it, DataDirection::FromHost(4096), &NEW));
    rig.advance_time(Span::from_ms(500));
    if bugs == InjectedBugs::default() {
        let is_answered = tags.iter().any(|tag| rig.lines[new].done.contains_key(tag));
        assert!(!is_answered, "{name}: the old one is in the medium");
    }
    medium.store(LET_GO, Ordering::Relaxed);
    (0..5).for_each(|_| rig.advance_time(Span::from_ms(1)));
    for tag in tags {
        let (completion, _) = rig.lines[new].done.remove(&tag).expect("it is answered");
        assert_eq!(completion.status(), Status::SUCCESS, "{name}");
    }
    let bytes = read_block(&mut rig, new);
    rig.lines.clear();
    rig.assert_all_released();
    bytes
}

#[test]
fn write_of_an_ended_association_never_overwrites_a_newer_one() {
    for (name, end) in ENDS {
        for host in [None, Some(9)] {
            let found = device_data_after(InjectedBugs::default(), name, end, host);
            assert_eq!(found[0], NEW[0], "{name}, {host:?}");
        }
    }
}

#[test]
fn injected_bug_of_unfenced_writes_is_detected() {
    let bugs = InjectedBugs { unfenced_writes: true, ..InjectedBugs::default() };
    for (name, end) in ENDS {
        assert_eq!(device_data_after(bugs, name, end, None)[0], OLD[0], "{name}");
    }
}

#[test]
fn device_that_never_completes_locks_only_its_written_blocks() {
    let (mut rig, medium) = target_with_late_writes(InjectedBugs::default());
    let (_, cntlid) = rig.connect_admin_queue();
    let old = rig.connect_io_queue(cntlid, 1);
    rig.lines[old].submit(&write_command(), DataDirection::FromHost(4096), &OLD);
    rig.run_until_idle();
    (0..2).for_each(|line| rig.lines[line].pipe = None);
    rig.run_until_idle();
    let new = rig.connect_host_with_io_queue(9).1;
    let blocked = read_or_write_command(IoOpcode::Read.code(), 7, 1);
    let tag = rig.lines[new].submit(&blocked, DataDirection::ToHost(512), &[]);
    rig.run_until_idle();
    for _ in 0..4 {
        rig.advance_time(Span::from_ms(1_249));
        let beside = read_or_write_command(IoOpcode::Read.code(), 8, 1);
        let (completion, _) = rig.execute_command(new, &beside, DataDirection::ToHost(512), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(!rig.lines[new].done.contains_key(&tag));
    }
    rig.advance_time(Span::from_ms(4));
    let (completion, _) = rig.lines[new].done.remove(&tag).expect("it waits no longer");
    assert_eq!(completion.status(), Status::COMMAND_INTERRUPTED, "it may be tried again");
    let reported = |rig: &TestTarget, text: &str| {
        let is_it = |new_events: &&TargetEvent| matches!(new_events, TargetEvent::Error(said) if said.contains(text));
        rig.new_events.iter().filter(is_it).count()
    };
    let late = "opcode 0x01 at block 0 of namespace 1: the blocks that they write are locked";
    assert_eq!(
        (reported(&rig, late), reported(&rig, "have drained")),
        (1, 0),
        "{:?}",
        rig.new_events
    );
    medium.store(LET_GO, Ordering::Relaxed);
    rig.advance_time(Span::from_ms(1));
    assert_eq!(
        reported(&rig, "have drained 5001 ms after it was stopped"),
        1,
        "{:?}",
        rig.new_events
    );
    let (completion, _) = rig.execute_command(new, &blocked, DataDirection::ToHost(512), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
}

/// The thread of the queue has ended with a write in the device, which may still take effect.
#[test]
fn controller_with_abandoned_writes_is_never_reported_as_reset() {
    for is_in_flight in [false, true] {
        let (mut rig, _) = target_with_late_writes(InjectedBugs::default());
        let (one, cntlid) = rig.connect_admin_queue();
        let io = rig.connect_io_queue(cntlid, 1);
        let (two, _) = rig.connect_admin_queue();
        let whom = identify_for_reset(&mut rig, one);
        rig.lines[io].submit(&write_command(), DataDirection::FromHost(4096), &OLD);
        rig.run_until_idle();
        let early = is_in_flight.then(|| submit_reset(&mut rig, two, whom));
        drop(rig.guests.drain(..2).collect::<Vec<_>>());
        for _ in 0..3 {
            rig.advance_time(Span::from_ms(500));
        }
        assert_eq!(rig.service.association_count(), 1);
        if let Some(tag) = early {
            let (completion, _) = rig.lines[two].done.remove(&tag).expect("it waits no longer");
            assert_eq!(completion.status(), Status::INTERNAL_ERROR);
        }
        let late = execute_reset(&mut rig, two, whom);
        assert_eq!(late.status(), Status::INVALID_CONTROLLER_IDENTIFIER.with_dnr());
    }
}

/// The queue runs on another reactor, which is stalled.
#[test]
fn no_association_starts_before_the_queues_of_the_ended_one_have_stopped() {
    let (mut rig, _) = target_with_late_writes(InjectedBugs::default());
    let (_, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    let elsewhere = rig.guests.remove(1);
    rig.lines[0].pipe = None;
    rig.run_until_idle();
    let line = rig.open_connection(admin_config());
    let connect = |rig: &mut TestTarget| {
        rig.submit_connect(line, &admin_connect(), &connect_data(CNTLID_DYNAMIC))
    };
    let tag = connect(&mut rig);
    rig.advance_time(Span::from_ms(500));
    assert!(!rig.lines[line].done.contains_key(&tag));
    rig.advance_time(Span::from_ms(501));
    let (completion, _) = rig.lines[line].done.remove(&tag).expect("it waits no longer");
    assert_eq!(completion.status(), Status::CONNECT_CONTROLLER_BUSY);
    let tag = connect(&mut rig);
    rig.guests.push(elsewhere);
    rig.run_until_idle();
    rig.advance_time(Span::from_ms(1));
    let (completion, _) = rig.lines[line].done.remove(&tag).expect("they have stopped");
    assert_eq!(completion.status(), Status::SUCCESS);
}
