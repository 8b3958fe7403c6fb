//! Rate limits of hosts, namespaces and subsystems, in simulated time.

use std::collections::BTreeMap;
use std::num::NonZeroU64;

use tenmil_base::Span;
use tenmil_block::{QosLimits, RateLimit};
use tenmil_nvme_tcp::{Connection, DataDirection};
use tenmil_wire::admin::KeepAlive;
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect, Disconnect};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status, TypedCommand};

use super::test_target::{
    ENABLED, HOST, NQN, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, pattern, read_or_write_command,
};
use crate::tcp::ExportLimits;

const BLOCK: u32 = 512;

fn rate(iops: u64, bytes: u64) -> RateLimit {
    RateLimit { iops: NonZeroU64::new(iops), bytes: NonZeroU64::new(bytes) }
}

fn total(iops: u64, bytes: u64) -> QosLimits {
    QosLimits { total: rate(iops, bytes), ..QosLimits::default() }
}

fn of_each_host(limits: QosLimits) -> ExportLimits {
    ExportLimits { each_host: limits, ..ExportLimits::default() }
}

fn set_limits(rig: &mut TestTarget, limits: ExportLimits) {
    assert!(rig.service.set_export_limits(rig.now, NQN, limits.clone()));
    assert_eq!(rig.service.export_limits(NQN), Some(limits));
    rig.run_until_idle();
}

/// Read or write of `blocks` blocks at block 0, without waiting for it.
fn submit(rig: &mut TestTarget, line: usize, opcode: IoOpcode, blocks: u32) -> u16 {
    let len_bytes = blocks * BLOCK;
    let command = read_or_write_command(opcode.code(), 0, blocks);
    match opcode {
        IoOpcode::Read => rig.lines[line].submit(&command, DataDirection::ToHost(len_bytes), &[]),
        _ => {
            let bytes = pattern(1, len_bytes as usize);
            rig.lines[line].submit(&command, DataDirection::FromHost(len_bytes), &bytes)
        }
    }
}

/// Load of one connection: commands of one kind, of which `depth` are always outstanding.
#[derive(Clone, Copy)]
struct Load {
    line: usize,
    opcode: IoOpcode,
    blocks: u32,
    depth: usize,
}

impl Load {
    fn new(line: usize, opcode: IoOpcode) -> Self {
        Self { line, opcode, blocks: 1, depth: 16 }
    }
}

/// Runs the loads for some milliseconds; returns how many commands of each have completed. They leave
/// their last commands outstanding.
fn run(rig: &mut TestTarget, loads: &[Load], ms: u64) -> Vec<usize> {
    let mut counts = vec![0; loads.len()];
    for _ in 0..ms {
        for (load, count) in loads.iter().zip(&mut counts) {
            // Everything else on the connection has completed before.
            let done = std::mem::take(&mut rig.lines[load.line].done);
            assert!(done.values().all(|(done, _)| done.status() == Status::SUCCESS));
            *count += done.len();
            while rig.lines[load.line].end.outstanding_tags().count() < load.depth {
                submit(rig, load.line, load.opcode, load.blocks);
            }
        }
        rig.advance_time(Span::from_ms(1));
    }
    counts
}

/// Whether a number of commands is the expected one, give or take the burst and what is under way.
#[track_caller]
fn assert_near(count: usize, expected: usize, slack: usize) {
    assert!(count.abs_diff(expected) <= slack, "{count}, expected {expected} within {slack}");
}

#[test]
fn connections_of_a_host_share_its_limits_whatever_their_number() {
    let mut rig = TestTarget::new();
    set_limits(&mut rig, of_each_host(total(1_000, 0)));
    let (_, cntlid) = rig.connect_admin_queue();
    let lines = [1, 2, 3, 4].map(|qid| rig.connect_io_queue(cntlid, qid));
    let loads = lines.map(|line| Load::new(line, IoOpcode::Read));
    let one = run(&mut rig, &loads[..1], 1_000);
    assert_near(one[0], 1_000, 22);
    let all = run(&mut rig, &loads, 1_000);
    assert_near(all.iter().sum(), 1_000, 22);
    for count in all {
        assert_near(count, 250, 25);
    }
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn held_commands_start_in_their_order_and_before_later_ones() {
    let mut rig = TestTarget::new();
    set_limits(&mut rig, of_each_host(total(100, 0)));
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    let (mut submitted, mut completed) = (Vec::new(), Vec::new());
    // At times one arrives in the millisecond in which the oldest of those that wait may start.
    for ms in 0..400 {
        if ms % 7 == 0 {
            submitted.push(submit(&mut rig, line, IoOpcode::Read, 1));
            // It is in the socket when the target polls next.
            rig.lines[line].poll_once(rig.now);
        }
        rig.advance_time(Span::from_ms(1));
        completed.extend(std::mem::take(&mut rig.lines[line].done).into_keys());
    }
    assert_near(completed.len(), 40, 4);
    assert_eq!(completed, submitted[..completed.len()]);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn hosts_have_limits_of_their_own_and_of_the_namespace_together() {
    let mut rig = TestTarget::new();
    let namespaces = BTreeMap::from([(1, total(500, 0))]);
    let hosts = BTreeMap::from([(HOST.to_owned(), total(100, 0))]);
    let limits = ExportLimits { namespaces, hosts, ..ExportLimits::default() };
    set_limits(&mut rig, limits);
    let (_, cntlid) = rig.connect_admin_queue();
    let limited = rig.connect_io_queue(cntlid, 1);
    let admin = rig.open_connection(admin_config());
    let data = |cntlid| {
        connect_data(cntlid).with(|data| {
            data.hostid([8; 16]).hostnqn(Ascii::nul_padded("nqn.2026-01.org.tenmil:other"))
        })
    };
    let done = rig.execute_connect(admin, &admin_connect(), &data(CNTLID_DYNAMIC));
    rig.set_property(admin, offset::CC, ENABLED);
    let other = rig.open_connection(io_config());
    let cntlid = u16::try_from(done.dw0()).unwrap();
    let done = rig.execute_connect(other, &io_connect(1), &data(cntlid));
    assert_eq!(done.status(), Status::SUCCESS);

    let loads = [limited, other].map(|line| Load::new(line, IoOpcode::Write));
    let counts = run(&mut rig, &loads, 2_000);
    assert_near(counts[0], 200, 20);
    assert_near(counts[1], 800, 40);
    // The subsystem has the lowest limit now.
    let subsystem = QosLimits { writes: rate(0, 50 * 512), ..QosLimits::default() };
    set_limits(&mut rig, ExportLimits { subsystem, ..ExportLimits::default() });
    let counts = run(&mut rig, &loads, 2_000);
    assert_near(counts.iter().sum(), 100, 40);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn reads_and_writes_are_limited_apart_in_requests_and_bytes() {
    let mut rig = TestTarget::new();
    let limits = QosLimits { reads: rate(300, 0), writes: rate(0, 1 << 20), ..total(0, 0) };
    set_limits(&mut rig, of_each_host(limits));
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    let read = Load { depth: 8, ..Load::new(line, IoOpcode::Read) };
    assert_near(run(&mut rig, &[read], 1_000)[0], 300, 10);
    // Writes pass the reads that are held.
    let tag = submit(&mut rig, line, IoOpcode::Write, 8);
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&tag));
    rig.advance_time(Span::from_secs(1));
    // In a capsule, and by R2T.
    for (blocks, expected) in [(8, 256), (64, 32)] {
        rig.lines[line].done.clear();
        let write = Load { blocks, depth: 4, ..Load::new(line, IoOpcode::Write) };
        assert_near(run(&mut rig, &[write], 1_000)[0], expected, 12);
        rig.advance_time(Span::from_secs(2));
    }
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn burst_is_served_at_once() {
    let mut rig = TestTarget::new();
    let limits = QosLimits { burst: Span::from_secs(2), ..total(50, 0) };
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    rig.advance_time(Span::from_secs(10));
    set_limits(&mut rig, of_each_host(limits));
    let load = Load { depth: 100, ..Load::new(line, IoOpcode::Read) };
    assert_near(run(&mut rig, &[load], 2)[0], 100, 1);
    assert_near(run(&mut rig, &[load], 1_000)[0], 50, 3);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn limits_change_while_commands_are_held() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    let load = Load::new(line, IoOpcode::Write);
    // Each millisecond all outstanding commands complete.
    assert_near(run(&mut rig, &[load], 100)[0], 1_600, 16);
    for (iops, expected) in [(1_000, 1_000), (100, 100), (2_000, 2_000)] {
        set_limits(&mut rig, of_each_host(total(iops, 0)));
        assert_near(run(&mut rig, &[load], 1_000)[0], expected, 45);
    }
    set_limits(&mut rig, of_each_host(total(1, 0)));
    run(&mut rig, &[load], 10);
    set_limits(&mut rig, ExportLimits::default());
    rig.advance_time(Span::from_ms(1));
    assert_eq!(rig.lines[line].end.outstanding_tags().count(), 0, "nothing is held any more");
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn held_writes_have_bounded_memory_and_the_rest_is_not_read() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let lines = [rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2)];
    set_limits(&mut rig, of_each_host(total(1, 0)));
    let free = rig.service.buffer_pool().free_bytes();
    // 8 KiB in the capsule each, and 128 KiB by R2T.
    let mut tags = Vec::new();
    for (line, blocks) in [(lines[0], 16), (lines[1], 256)] {
        tags.extend((0..100).map(|_| (line, submit(&mut rig, line, IoOpcode::Write, blocks))));
    }
    rig.run_until_idle();
    let used = free - rig.service.buffer_pool().free_bytes();
    assert!((64 << 10..=320 << 10).contains(&used), "{used} bytes are used");
    // Longer than every time limit of a connection: the host is not at fault.
    for _ in 0..45 {
        rig.advance_time(Span::from_secs(1));
    }
    let count: usize = lines.iter().map(|line| rig.lines[*line].done.len()).sum();
    assert_near(count, 46, 4);
    assert_eq!(rig.guests.len(), 3, "{:?}", rig.new_events);
    set_limits(&mut rig, ExportLimits::default());
    rig.advance_time(Span::from_secs(1));
    for (line, tag) in tags {
        let (done, _) = rig.lines[line].done.remove(&tag).expect("it has completed");
        assert_eq!(done.status(), Status::SUCCESS);
    }
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn held_command_is_aborted() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    set_limits(&mut rig, of_each_host(total(1, 0)));
    for (opcode, blocks) in [(IoOpcode::Read, 1), (IoOpcode::Write, 8), (IoOpcode::Write, 256)] {
        run(&mut rig, &[Load { depth: 1, ..Load::new(line, IoOpcode::Read) }], 3);
        let tag = submit(&mut rig, line, opcode, blocks);
        let next = submit(&mut rig, line, opcode, blocks);
        rig.run_until_idle();
        let abort = Command::new(AdminOpcode::Abort.code()).with_cdw10(u32::from(tag) << 16 | 1);
        let (done, _) = rig.execute_command(admin, &abort, DataDirection::None, &[]);
        assert_eq!((done.status(), done.dw0()), (Status::SUCCESS, 0), "{opcode:?}");
        let (done, _) = rig.lines[line].done.remove(&tag).expect("it has ended");
        assert_eq!(done.status(), Status::ABORT_REQUESTED);
        for _ in 0..4 {
            rig.advance_time(Span::from_secs(1));
        }
        let (done, _) = rig.lines[line].done.remove(&next).expect("it has completed");
        assert_eq!(done.status(), Status::SUCCESS);
    }
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn disconnect_reset_and_loss_of_connection_drop_held_commands() {
    for end in ["admin connection", "I/O connection", "reset", "disconnect", "removed"] {
        let mut rig = TestTarget::new();
        let (admin, cntlid) = rig.connect_admin_queue();
        let line = rig.connect_io_queue(cntlid, 1);
        set_limits(&mut rig, of_each_host(total(1, 0)));
        for blocks in [1, 16, 256] {
            for opcode in [IoOpcode::Read, IoOpcode::Write] {
                (0..12).for_each(|_| _ = submit(&mut rig, line, opcode, blocks));
            }
        }
        rig.run_until_idle();
        let done = rig.lines[line].done.len();
        assert!(done <= 2, "{done}");
        match end {
            "admin connection" => rig.lines[admin].pipe = None,
            "I/O connection" => rig.lines[line].pipe = None,
            "reset" => {
                rig.set_property(admin, offset::CC, 0);
            }
            "removed" => assert!(rig.service.remove_subsystem(NQN)),
            _ => {
                let command = Disconnect::default().to_command();
                rig.lines[line].submit(&command, DataDirection::None, &[]);
            }
        }
        // An end that lies behind data that are not read is seen as these are.
        for _ in 0..100 {
            rig.advance_time(Span::from_secs(1));
        }
        assert_eq!(
            rig.guests.len(),
            usize::from(["I/O connection", "reset", "disconnect"].contains(&end)),
            "{end}"
        );
        rig.lines.clear();
        rig.assert_all_released();
    }
}

#[test]
fn host_with_held_commands_is_kept_alive_and_expires_without_activity() {
    let mut rig = TestTarget::new();
    set_limits(&mut rig, of_each_host(total(1, 0)));
    let admin = rig.open_connection(admin_config());
    let connect = Connect { kato: 5_000, ..admin_connect() };
    let done = rig.execute_connect(admin, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(admin, offset::CC, ENABLED);
    let line = rig.connect_io_queue(u16::try_from(done.dw0()).unwrap(), 1);
    // Commands that arrive are activity though none of them starts, and so is Keep Alive.
    for second in 0..20 {
        submit(&mut rig, line, IoOpcode::Read, 1);
        if second % 3 == 2 {
            let command = KeepAlive::default().to_command();
            let (done, _) = rig.execute_command(admin, &command, DataDirection::None, &[]);
            assert_eq!(done.status(), Status::SUCCESS);
        }
        rig.advance_time(Span::from_secs(1));
    }
    assert_eq!(rig.service.association_count(), 1);
    (0..120).for_each(|_| _ = submit(&mut rig, line, IoOpcode::Read, 1));
    rig.run_until_idle();
    set_limits(&mut rig, of_each_host(QosLimits { reads: rate(0, 1), ..QosLimits::default() }));
    for _ in 0..30 {
        rig.advance_time(Span::from_secs(1));
    }
    assert_eq!(rig.service.association_count(), 0, "held commands are no activity");
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn waiting_for_limits_is_counted() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    set_limits(&mut rig, of_each_host(total(10, 0)));
    rig.advance_time(Span::from_secs(5));
    (0..11).for_each(|_| _ = submit(&mut rig, line, IoOpcode::Read, 1));
    for _ in 0..110 {
        rig.advance_time(Span::from_ms(10));
    }
    let (_, samples) = rig.service.io_stats().remove(0);
    let stats = &samples[0].stats;
    // The first one passes; the others wait 100, 200 … 1000 ms.
    assert_eq!(stats.limited, 10);
    assert_near(usize::try_from(stats.limit_wait.ns / 1_000_000).unwrap(), 5_500, 100);
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn flushes_are_not_limited_and_other_commands_are() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    set_limits(&mut rig, of_each_host(total(1, 0)));
    rig.advance_time(Span::from_secs(5));
    let flush = Command::new(IoOpcode::Flush.code()).with_nsid(1);
    for _ in 0..10 {
        let (done, _) = rig.execute_command(line, &flush, DataDirection::None, &[]);
        assert_eq!(done.status(), Status::SUCCESS);
    }
    let zeroes = read_or_write_command(IoOpcode::WriteZeroes.code(), 0, 1);
    let tags = [1, 2].map(|_| rig.lines[line].submit(&zeroes, DataDirection::None, &[]));
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&tags[0]));
    assert!(!rig.lines[line].done.contains_key(&tags[1]));
    rig.advance_time(Span::from_secs(1));
    assert!(rig.lines[line].done.contains_key(&tags[1]));
    rig.lines.clear();
    rig.assert_all_released();
}

#[test]
fn copied_bytes_count_against_limits_of_bandwidth() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let line = rig.connect_io_queue(cntlid, 1);
    let writes = QosLimits { writes: rate(0, 1 << 20), ..QosLimits::default() };
    set_limits(&mut rig, of_each_host(writes));
    // One range of 128 blocks, 64 KiB, from block 0 to block 256.
    let mut range = [0; 32];
    range[16] = 127;
    let copy = read_or_write_command(IoOpcode::Copy.code(), 256, 1).with_cdw12(0);
    let mut copies = 0;
    for _ in 0..4_000 {
        let done = std::mem::take(&mut rig.lines[line].done);
        assert!(done.values().all(|(done, _)| done.status() == Status::SUCCESS));
        copies += done.len();
        while rig.lines[line].end.outstanding_tags().count() < 4 {
            rig.lines[line].submit(&copy, DataDirection::FromHost(32), &range);
        }
        rig.advance_time(Span::from_ms(1));
    }
    // 16 per second, and the first ones, which nothing was charged before.
    assert_near(copies, 64, 3);
    rig.lines.clear();
    rig.assert_all_released();
}
