//! Memory shortage: the limit holds, and all hosts make progress.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, Random, Request,
    Segment,
};
use tenmil_drivers::RamDevice;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_nvme_tcp::DataDirection;
use tenmil_reactor::{DetachReason, Poller};
use tenmil_wire::fabrics::CNTLID_DYNAMIC;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{
    BLOCKS, NQN, TestTarget, admin_config, admin_connect, connect_data, pattern,
    read_or_write_command, service_limits,
};
use crate::tcp::{
    AllowedHosts, ControllerModel, ServiceLimits, SubsystemExportConfig, SubsystemSecurity,
};

/// Size of the largest command; the memory suffices for one.
const LARGEST: u32 = 128 << 10;

/// Memory for the reserved block and the own pages of three connections, and little more.
fn limits_with_little_memory() -> ServiceLimits {
    ServiceLimits { memory_bytes: 260 << 10, connections_max: 3, ..service_limits() }
}

/// Runs many commands on two connections, in memory that suffices for a few.
fn run_random_commands(rig: &mut TestTarget, seed: u64, rounds: usize) {
    let (_, cntlid) = rig.connect_admin_queue();
    let lines = [rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2)];
    let mut random = Random::new(seed);
    let mut draw = |bound: u64| usize::try_from(random.below(bound)).unwrap();
    for round in 0..rounds {
        let mut asked = Vec::new();
        for number in 0..60_u32 {
            let line = lines[draw(2)];
            let blocks = [1, 8, 16, 17, 64, 256][draw(6)];
            let len = u32::try_from(blocks * 512).unwrap();
            let lba = u64::try_from(draw(3800)).unwrap();
            let blocks = u32::try_from(blocks).unwrap();
            let tag = if draw(2) == 0 {
                let bytes = pattern(number, len as usize);
                let write = read_or_write_command(IoOpcode::Write.code(), lba, blocks);
                rig.lines[line].submit(&write, DataDirection::FromHost(len), &bytes)
            } else {
                let read = read_or_write_command(IoOpcode::Read.code(), lba, blocks);
                rig.lines[line].submit(&read, DataDirection::ToHost(len), &[])
            };
            asked.push((line, tag));
        }
        rig.run_until_idle();
        for (line, tag) in asked {
            let ended = rig.lines[line].done.remove(&tag);
            let (completion, _) = ended.unwrap_or_else(|| panic!("round {round}: {line} {tag}"));
            assert_eq!(completion.status(), Status::SUCCESS);
        }
    }
}

#[test]
fn memory_freed_by_small_commands_serves_a_large_one() {
    for seed in 0..4 {
        let limits = limits_with_little_memory();
        let mut rig = TestTarget::with_options(limits, |config| config);
        run_random_commands(&mut rig, seed, 3);
        rig.lines.clear();
        rig.assert_all_released();
    }
}

#[test]
fn small_stream_fragments_give_the_same_result() {
    let mut rig = TestTarget::with_options(limits_with_little_memory(), |config| config);
    rig.narrow = Some(1500);
    run_random_commands(&mut rig, 9, 2);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn insufficient_buffer_memory_is_rejected_with_the_required_amount() {
    let regions = tenmil_dma::RegionTable::new(8);
    let limits = ServiceLimits { memory_bytes: 128 << 10, ..service_limits() };
    let refused = crate::tcp::Service::new(&regions, limits).unwrap_err();
    assert!(refused.text.contains("131072 bytes, expected 262144"), "{refused}");
}

#[test]
fn host_with_overdue_data_is_disconnected() {
    let mut rig = TestTarget::with_options(limits_with_little_memory(), |config| config);
    let (_, cntlid) = rig.connect_admin_queue();
    let lines = [rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2)];
    let (bytes, len) = (pattern(1, 128 << 10), 128 << 10);
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    rig.lines[lines[0]].submit(&write, DataDirection::FromHost(len), &bytes);
    // The host has sent the command, and does not respond to the R2T.
    let capsule = rig.lines[lines[0]].sent.len() + 72;
    rig.lines[lines[0]].mute_after = Some(capsule);
    let other = rig.lines[lines[1]].submit(&write, DataDirection::FromHost(len), &bytes);
    rig.run_until_idle();
    assert!(!rig.lines[lines[1]].done.contains_key(&other), "there is memory for one");
    rig.advance_time(tenmil_base::Span::from_secs(31));
    assert!(rig.lines[lines[1]].done.contains_key(&other), "it comes back");
    let gone = rig
        .new_events
        .iter()
        .any(|new_events| new_events.to_string().contains("send requested data"));
    assert!(gone, "{:?}", rig.new_events);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn a_connection_beyond_the_limit_is_rejected_until_another_closes() {
    let mut rig = TestTarget::with_options(limits_with_little_memory(), |config| config);
    let (admin, cntlid) = rig.connect_admin_queue();
    rig.connect_io_queue(cntlid, 1);
    rig.connect_io_queue(cntlid, 2);
    let (_, far) = super::test_target::TestStream::pair(&rig.regions);
    let refused = rig.service.accept_stream(Box::new(far), 1, rig.now).unwrap_err();
    assert!(refused.text.contains("3 are connected, expected fewer"), "{refused}");
    rig.lines[admin].pipe = None;
    rig.run_until_idle();
    rig.connect_admin_queue();
}

#[test]
fn host_that_does_not_receive_is_disconnected() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    rig.lines[io].is_deaf = true;
    for _ in 0..60 {
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 64);
        rig.lines[io].submit(&read, DataDirection::ToHost(64 * 512), &[]);
    }
    rig.run_until_idle();
    assert!(
        rig.service.buffer_pool().free_bytes()
            < rig.service.buffer_pool().size_bytes() - (512 << 10)
    );
    rig.advance_time(tenmil_base::Span::from_secs(31));
    let gone = rig
        .new_events
        .iter()
        .any(|new_events| new_events.to_string().contains("receive requested data"));
    assert!(gone, "{:?}", rig.new_events);
    rig.lines.clear();
    rig.assert_all_released();
}

/// A host receives a little of its data each second, for a minute. Returns whether it is still
/// connected, and whether a command of another queue that waits for the same memory (if
/// `is_wanted`) has completed.
fn run_slow_receiver(is_wanted: bool) -> (bool, bool) {
    let mut rig = TestTarget::with_options(limits_with_little_memory(), |config| config);
    rig.narrow = Some(1000);
    let (_, cntlid) = rig.connect_admin_queue();
    let (one, two) = (rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2));
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
    rig.lines[one].is_deaf = true;
    rig.lines[one].submit(&read, DataDirection::ToHost(LARGEST), &[]);
    rig.run_until_idle();
    let waiting =
        is_wanted.then(|| rig.lines[two].submit(&read, DataDirection::ToHost(LARGEST), &[]));
    for _ in 0..60 {
        rig.advance_time(tenmil_base::Span::from_secs(1));
        let pipe = rig.lines[one].pipe.as_mut().unwrap();
        pipe.receive();
        pipe.consume(pipe.buffered().len());
    }
    let said = |new_events: &crate::tcp::TargetEvent| {
        new_events.to_string().contains("while others waited")
    };
    let is_gone = rig.new_events.iter().any(said);
    assert_eq!(rig.guests.len(), if is_gone { 2 } else { 3 });
    let has_ended = waiting.is_some_and(|tag| rig.lines[two].done.contains_key(&tag));
    (!is_gone, has_ended)
}

#[test]
fn host_that_receives_slowly_while_others_wait_is_disconnected() {
    assert_eq!(run_slow_receiver(true), (false, true));
    assert_eq!(run_slow_receiver(false), (true, false));
}

/// An admin connection and two I/O connections: the first holds the memory and its host sends no
/// data; the second waits for memory with the returned command.
fn target_with_waiting_host() -> (TestTarget, [usize; 3], u16) {
    let mut rig = TestTarget::with_options(limits_with_little_memory(), |config| config);
    let (admin, cntlid) = rig.connect_admin_queue();
    let (one, two) = (rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2));
    let bytes = pattern(1, LARGEST as usize);
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    rig.lines[one].submit(&write, DataDirection::FromHost(LARGEST), &bytes);
    let capsule = rig.lines[one].sent.len() + 72;
    rig.lines[one].mute_after = Some(capsule);
    rig.run_until_idle();
    let waiting = rig.lines[two].submit(&write, DataDirection::FromHost(LARGEST), &bytes);
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().waiting_connections(), 1);
    (rig, [admin, one, two], waiting)
}

/// Lets the first connection continue, and checks that all memory can be allocated once more.
fn assert_first_command_completes(rig: &mut TestTarget, one: usize) {
    rig.lines[one].mute_after = None;
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().waiting_connections(), 0);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
    let (completion, _) = rig.execute_command(one, &read, DataDirection::ToHost(LARGEST), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn abort_of_the_only_waiting_command_leaves_the_wait_queue() {
    let (mut rig, [admin, one, two], waiting) = target_with_waiting_host();
    let cdw10 = u32::from(waiting) << 16 | 2;
    let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(cdw10);
    let (completion, _) = rig.execute_command(admin, &abort, DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 0));
    let (ended, _) = rig.lines[two].done.remove(&waiting).unwrap();
    assert_eq!(ended.status(), Status::ABORT_REQUESTED);
    assert_first_command_completes(&mut rig, one);
}

#[test]
fn a_terminated_connection_leaves_the_wait_queue() {
    let (mut rig, [_, one, two], _) = target_with_waiting_host();
    // Not a valid PDU; the host still receives the termination request.
    let line = &mut rig.lines[two];
    let whole = tenmil_base::SendSlice::Headers { at: 0, len_bytes: 24 };
    line.pipe.as_mut().unwrap().send(&[0xff; 24], &[whole], false).unwrap();
    line.is_deaf = true;
    rig.run_until_idle();
    assert_eq!(rig.guests.len(), 3, "the response is still being sent");
    assert_first_command_completes(&mut rig, one);
}

/// RAM device that completes nothing while `is_stuck` is set.
struct NeverCompletingDevice {
    ram: RamDevice,
    is_stuck: Arc<AtomicBool>,
}

struct NeverCompletingChannel {
    channel: Box<dyn IoChannel>,
    is_stuck: Arc<AtomicBool>,
}

impl BlockDevice for NeverCompletingDevice {
    fn limits(&self) -> tenmil_base::Limits {
        self.ram.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (channel, is_stuck) = (self.ram.channel()?, Arc::clone(&self.is_stuck));
        Ok(Box::new(NeverCompletingChannel { channel, is_stuck }))
    }
}

impl IoChannel for NeverCompletingChannel {
    fn limits(&self) -> &tenmil_base::Limits {
        self.channel.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        self.channel.submit(now, requests, segments)
    }

    fn poll(&mut self, now: Instant, answers: &mut CompletionBatch) -> usize {
        if self.is_stuck.load(Ordering::Relaxed) { 0 } else { self.channel.poll(now, answers) }
    }
}

impl ChannelWakeup for NeverCompletingChannel {}

/// Service whose device completes nothing while the flag is set.
pub(super) fn target_with_never_completing_device() -> (TestTarget, Arc<AtomicBool>) {
    let is_stuck = Arc::new(AtomicBool::new(true));
    let stuck = Arc::clone(&is_stuck);
    let rig = TestTarget::with_options(service_limits(), |config| config);
    let medium = NeverCompletingDevice {
        ram: RamDevice::new(&rig.regions, 512, BLOCKS).unwrap(),
        is_stuck: stuck,
    };
    let namespaces = vec![NamespaceConfig::new(Arc::new(medium))];
    let config = SubsystemConfig { nqn: NQN.to_owned(), ..SubsystemConfig::new("S", namespaces) };
    rig.service.remove_subsystem(NQN);
    rig.service
        .add_subsystem(SubsystemExportConfig {
            subsystem: Subsystem::new(config).unwrap(),
            nqn: NQN.to_owned(),
            hosts: AllowedHosts::Any,
            ports: BTreeMap::from([(1, Vec::new())]),
            model: ControllerModel::Dynamic,
            masks: BTreeMap::new(),
            security: SubsystemSecurity::default(),
        })
        .unwrap();
    (rig, is_stuck)
}

#[test]
fn a_closed_connection_keeps_only_memory_of_executing_commands() {
    let (mut rig, is_stuck) = target_with_never_completing_device();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    rig.lines[io].submit(&read, DataDirection::ToHost(4096), &[]);
    rig.run_until_idle();
    let before = rig.service.buffer_pool().free_bytes();
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    rig.lines[io].mute_after = Some(rig.lines[io].sent.len() + 72);
    rig.lines[io].submit(&write, DataDirection::FromHost(LARGEST), &pattern(1, LARGEST as usize));
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().free_bytes(), before - u64::from(LARGEST));
    rig.lines.clear();
    rig.run_until_idle();
    assert_eq!(rig.guests.len(), 2, "its medium has not answered");
    assert!(rig.service.buffer_pool().free_bytes() >= before);
    is_stuck.store(false, Ordering::Relaxed);
    rig.assert_all_released();
}

#[test]
fn before_connect_a_connection_uses_only_its_own_pages() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let before = rig.service.buffer_pool().free_bytes();
    let wrong = Status::DATA_SGL_LENGTH_INVALID.with_dnr();
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    let asked = [0; 8].map(|_| {
        let bytes = pattern(1, LARGEST as usize);
        rig.lines[line].submit(&write, DataDirection::FromHost(LARGEST), &bytes)
    });
    // A command that fits but whose data never arrive: it holds both pages.
    rig.lines[line].mute_after = Some(9 * 72 + rig.lines[line].sent.len());
    let fits = read_or_write_command(IoOpcode::Write.code(), 0, 16);
    rig.lines[line].submit(&fits, DataDirection::FromHost(8192), &[0; 8192]);
    rig.run_until_idle();
    for tag in asked {
        assert_eq!(rig.lines[line].done.remove(&tag).unwrap().0.status(), wrong);
    }
    let budget = rig.service.buffer_pool();
    assert_eq!((budget.free_bytes(), budget.waiting_connections()), (before, 0));
    // Connect waits behind it for the pages.
    let (connect, data) = (admin_connect().to_command(), connect_data(CNTLID_DYNAMIC));
    let connect = rig.lines[line].submit(&connect, DataDirection::FromHost(1024), data.as_bytes());
    rig.lines[line].mute_after = None;
    rig.run_until_idle();
    assert_eq!(rig.lines[line].done.remove(&connect).unwrap().0.status(), Status::SUCCESS);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn slow_host_that_completes_commands_stays_connected() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let (before, len) = (rig.lines[io].sent.len(), 16 << 10);
    // R2Ts for all commands were sent at once; the network of the host is slow.
    rig.lines[io].mute_after = Some(before + 4 * 72);
    let asked = [0, 100, 200, 300].map(|lba| {
        let write = read_or_write_command(IoOpcode::Write.code(), lba, 32);
        rig.lines[io].submit(&write, DataDirection::FromHost(len), &pattern(1, len as usize))
    });
    rig.run_until_idle();
    for count in 1..=4 {
        rig.advance_time(tenmil_base::Span::from_secs(20));
        rig.lines[io].mute_after = Some(before + 4 * 72 + count * (24 + len as usize));
        rig.run_until_idle();
    }
    for tag in asked {
        let (completion, _) = rig.lines[io].done.remove(&tag).expect("it was not sent away");
        assert_eq!(completion.status(), Status::SUCCESS);
    }
}

#[test]
fn connect_succeeds_while_the_buffer_pool_is_exhausted() {
    let mut rig = TestTarget::with_options(
        ServiceLimits {
            connections_max: 4,
            memory_bytes: 272 << 10,
            ..limits_with_little_memory()
        },
        |config| config,
    );
    let (_, cntlid) = rig.connect_admin_queue();
    let one = rig.connect_io_queue(cntlid, 1);
    // All memory is allocated to data that never arrive, and other commands wait for more.
    rig.lines[one].mute_after = Some(rig.lines[one].sent.len() + 4 * 72);
    for _ in 0..4 {
        let write = read_or_write_command(IoOpcode::Write.code(), 0, 128);
        rig.lines[one].submit(&write, DataDirection::FromHost(64 << 10), &pattern(1, 64 << 10));
    }
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().waiting_connections(), 1);
    rig.connect_io_queue(cntlid, 2);
    rig.connect_io_queue(cntlid, 3);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn a_connection_migrates_once_its_devices_are_idle() {
    let (mut rig, is_stuck) = target_with_never_completing_device();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let first = rig.lines[io].submit(&read, DataDirection::ToHost(4096), &[]);
    rig.run_until_idle();
    assert!(!rig.guests[io].try_detach(DetachReason::Migrating), "its medium works for it");
    let second = rig.lines[io].submit(&read, DataDirection::ToHost(4096), &[]);
    is_stuck.store(false, Ordering::Relaxed);
    rig.run_until_idle();
    let has_ended = |rig: &TestTarget, tag| rig.lines[io].done.contains_key(&tag);
    assert!(has_ended(&rig, first) && !has_ended(&rig, second));
    assert!(rig.guests[io].try_detach(DetachReason::Migrating));
    rig.guests[io].attach();
    rig.run_until_idle();
    assert!(has_ended(&rig, second));
}

#[test]
fn a_connection_with_a_thread_bound_stream_does_not_migrate() {
    let mut rig = TestTarget::new();
    rig.traits.is_tied = true;
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    assert!(!rig.guests[io].try_detach(DetachReason::Migrating));
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(4096), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
}

#[test]
fn a_closed_connection_stays_until_devices_and_kernel_release_its_memory() {
    let (mut rig, is_stuck) = target_with_never_completing_device();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    rig.lines[io].submit(
        &read_or_write_command(IoOpcode::Read.code(), 0, 8),
        DataDirection::ToHost(4096),
        &[],
    );
    rig.run_until_idle();
    rig.lines[io].pipe = None;
    rig.run_until_idle();
    assert!(!rig.guests[io].try_detach(DetachReason::Migrating), "its medium works for it");
    is_stuck.store(false, Ordering::Relaxed);
    rig.run_until_idle();
    assert_eq!(rig.guests.len(), 1, "it is over");

    let (mut rig, _) = target_closed_during_zero_copy_read();
    assert!(!rig.guests[1].try_detach(DetachReason::Migrating), "the kernel reads its memory");
    rig.traits.reads.store(false, Ordering::Relaxed);
    rig.advance_time(tenmil_base::Span::from_ms(1));
    assert_eq!(rig.guests.len(), 1);
}

/// A host has received its data and disconnected while the kernel still references the sent buffers.
/// Returns the number of bytes that are free otherwise.
fn target_closed_during_zero_copy_read() -> (TestTarget, u64) {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let free = rig.service.buffer_pool().free_bytes();
    let io = rig.connect_io_queue(cntlid, 1);
    rig.traits.reads.store(true, Ordering::Relaxed);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
    rig.lines[io].submit(&read, DataDirection::ToHost(LARGEST), &[]);
    rig.run_until_idle();
    rig.lines[io].pipe = None;
    rig.run_until_idle();
    (rig, free)
}

#[test]
fn memory_referenced_by_the_kernel_is_not_reused() {
    let (mut rig, free) = target_closed_during_zero_copy_read();
    assert_eq!(rig.guests.len(), 2, "its end waits for the kernel");
    assert_eq!(rig.service.buffer_pool().free_bytes(), free - 8192 - u64::from(LARGEST));
    rig.advance_time(tenmil_base::Span::from_secs(10));
    assert_eq!(rig.service.buffer_pool().free_bytes(), free - 8192 - u64::from(LARGEST));
    rig.traits.reads.store(false, Ordering::Relaxed);
    rig.advance_time(tenmil_base::Span::from_ms(1));
    assert_eq!(rig.guests.len(), 1);
    assert_eq!(rig.service.buffer_pool().free_bytes(), free);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn memory_referenced_by_the_kernel_beyond_the_timeout_is_leaked_and_reported() {
    let (mut rig, free) = target_closed_during_zero_copy_read();
    rig.advance_time(tenmil_base::Span::from_secs(31));
    assert_eq!(rig.guests.len(), 1);
    assert_eq!(rig.service.buffer_pool().free_bytes(), free - u64::from(LARGEST));
    let said = |new_events: &crate::tcp::TargetEvent| {
        new_events.to_string().contains("still references 131072 bytes")
    };
    assert!(rig.new_events.iter().any(said), "{:?}", rig.new_events);
    // The same if the connection is dropped without waiting.
    let (mut rig, free) = target_closed_during_zero_copy_read();
    rig.guests.pop();
    rig.run_until_idle();
    assert_eq!(rig.service.buffer_pool().free_bytes(), free - u64::from(LARGEST));
    assert!(rig.new_events.iter().any(said), "{:?}", rig.new_events);
}

/// Connects a host of this name with an admin queue and `queues` I/O queues; returns the I/O
/// connections.
fn connect_host_named(rig: &mut TestTarget, name: &str, queues: u16) -> Vec<usize> {
    let data = |cntlid| -> tenmil_wire::fabrics::ConnectData {
        let nqn = tenmil_wire::layout::Ascii::nul_padded(&format!("nqn.2026-01.org.tenmil:{name}"));
        let mut id = [0; 16];
        id[..name.len()].copy_from_slice(name.as_bytes());
        connect_data(cntlid).with(|data| data.hostnqn(nqn).hostid(id))
    };
    let admin = rig.open_connection(admin_config());
    let completion = rig.execute_connect(admin, &admin_connect(), &data(CNTLID_DYNAMIC));
    assert_eq!(completion.status(), Status::SUCCESS);
    let cntlid = u16::try_from(completion.dw0()).unwrap();
    rig.set_property(admin, tenmil_wire::register::offset::CC, super::test_target::ENABLED);
    let connect = |rig: &mut TestTarget, qid| {
        let line = rig.open_connection(super::test_target::io_config());
        let completion =
            rig.execute_connect(line, &super::test_target::io_connect(qid), &data(cntlid));
        assert_eq!(completion.status(), Status::SUCCESS);
        line
    };
    (1..=queues).map(|qid| connect(rig, qid)).collect()
}

/// Sends more commands than can be granted; no data follow, except for a byte now and then.
fn submit_writes_without_data(rig: &mut TestTarget, lines: &[usize]) {
    for &line in lines {
        let sent = rig.lines[line].sent.len();
        for _ in 0..100 {
            let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
            rig.lines[line].submit(
                &write,
                DataDirection::FromHost(LARGEST),
                &pattern(1, LARGEST as usize),
            );
        }
        rig.lines[line].mute_after = Some(sent + 100 * 72);
    }
    rig.run_until_idle();
}

#[test]
fn host_makes_progress_while_others_send_slowly_into_all_buffers() {
    let mut rig = TestTarget::new();
    let attackers: Vec<usize> =
        ["one", "two"].iter().flat_map(|name| connect_host_named(&mut rig, name, 2)).collect();
    let honest = connect_host_named(&mut rig, "honest", 1)[0];
    submit_writes_without_data(&mut rig, &attackers);
    assert!(rig.service.buffer_pool().waiting_connections() > 0);
    let begin = rig.now;
    for second in 0..120 {
        for &line in &attackers {
            let line = &mut rig.lines[line];
            if second % 8 == 0 && line.pipe.is_some() {
                line.mute_after =
                    line.mute_after.map(|most| most + if second == 0 { 25 } else { 1 });
            }
        }
        rig.advance_time(tenmil_base::Span::from_secs(1));
        // This host sends all its data immediately, and completes within the time limit of a
        // command.
        let (lba, bytes) = (second % 8 * 256, pattern(7, LARGEST as usize));
        let write = read_or_write_command(IoOpcode::Write.code(), lba, 256);
        let read = read_or_write_command(IoOpcode::Read.code(), lba, 256);
        let (completion, _) =
            rig.execute_command(honest, &write, DataDirection::FromHost(LARGEST), &bytes);
        assert_eq!(completion.status(), Status::SUCCESS);
        let (completion, found) =
            rig.execute_command(honest, &read, DataDirection::ToHost(LARGEST), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert!(found == bytes);
    }
    let late = |new_events: &crate::tcp::TargetEvent| {
        new_events.to_string().contains("send requested data")
    };
    assert_eq!(
        rig.new_events.iter().filter(|new_events| late(new_events)).count(),
        attackers.len()
    );
    assert!(rig.now.since(begin) < tenmil_base::Span::from_secs(125));
    rig.lines.clear();
    rig.assert_all_released();
}

/// Whether a host that owes 128 KiB and sends one byte every second is still connected after
/// `seconds`.
fn stays_connected_sending_single_bytes(seconds: u64) -> bool {
    let mut rig = TestTarget::new();
    let line = connect_host_named(&mut rig, "one", 1)[0];
    submit_writes_without_data(&mut rig, &[line]);
    rig.lines[line].mute_after = rig.lines[line].mute_after.map(|most| most + 24);
    for _ in 0..seconds {
        rig.lines[line].mute_after = rig.lines[line].mute_after.map(|most| most + 1);
        rig.advance_time(tenmil_base::Span::from_secs(1));
    }
    rig.guests.len() == 2
}

#[test]
fn single_bytes_do_not_extend_the_data_timeout() {
    assert!(stays_connected_sending_single_bytes(29));
    assert!(!stays_connected_sending_single_bytes(34), "though it sends a byte every second");
}

/// Number of connections left after `steps` times 25 seconds. The hosts have sent more commands
/// than they can be granted, and send the data of one command per step.
fn connections_left_sending_slowly(names: &[&str], steps: usize) -> usize {
    let mut rig = TestTarget::new();
    let lines: Vec<usize> =
        names.iter().flat_map(|name| connect_host_named(&mut rig, name, 1)).collect();
    let (len, count) = (64 << 10, 120);
    for &line in &lines {
        let sent = rig.lines[line].sent.len();
        for _ in 0..count {
            let write = read_or_write_command(IoOpcode::Write.code(), 0, 128);
            rig.lines[line].submit(&write, DataDirection::FromHost(len), &pattern(1, len as usize));
        }
        rig.lines[line].mute_after = Some(sent + count * 72);
    }
    rig.run_until_idle();
    assert!(rig.service.buffer_pool().waiting_connections() > 0);
    for _ in 0..steps {
        for &line in &lines {
            let line = &mut rig.lines[line];
            line.mute_after = line.mute_after.map(|most| most + 24 + len as usize);
        }
        rig.run_until_idle();
        rig.advance_time(tenmil_base::Span::from_secs(25));
    }
    rig.guests.len()
}

#[test]
fn slow_host_is_disconnected_after_four_timeouts_while_others_need_memory() {
    assert_eq!(connections_left_sending_slowly(&["one", "two"], 4), 4);
    assert!(
        connections_left_sending_slowly(&["one", "two"], 6) < 4,
        "one of them at least is gone"
    );
    assert_eq!(
        connections_left_sending_slowly(&["one"], 8),
        2,
        "only its own commands wait for it"
    );
}

#[test]
fn abort_of_a_command_with_outstanding_data_frees_its_memory() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let free = rig.service.buffer_pool().free_bytes();
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    rig.lines[io].mute_after = Some(rig.lines[io].sent.len() + 72);
    let bytes = pattern(1, LARGEST as usize);
    let tag = rig.lines[io].submit(&write, DataDirection::FromHost(LARGEST), &bytes);
    rig.run_until_idle();
    let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(tag) << 16 | 1);
    let (completion, _) = rig.execute_command(admin, &abort, DataDirection::None, &[]);
    assert_eq!((completion.status(), completion.dw0()), (Status::SUCCESS, 0));
    assert!(rig.service.buffer_pool().free_bytes() < free, "its data may still come");
    rig.advance_time(tenmil_base::Span::from_secs(34));
    assert_eq!(rig.guests.len(), 1, "its host owes them");
    assert!(rig.service.buffer_pool().free_bytes() >= free);
}
