//! When a connection counts as idle, and that an idle connection is not polled.

use std::sync::Arc;

use tenmil_base::{Instant, Span};
use tenmil_drivers::RamDevice;
use tenmil_linux::{Clock, CpuList};
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_reactor::{ReactorOptions, Reactors};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, Connect};
use tenmil_wire::log::health::HealthInformation;
use tenmil_wire::register::offset;
use tenmil_wire::{AdminOpcode, Command, IoOpcode, Status};

use super::server::{connect_admin_queue, start_server, write_and_read};
use super::test_target::{
    ENABLED, NQN, TestTarget, admin_config, admin_connect, connect_data, pattern,
    read_or_write_command, service_limits,
};
use crate::tcp::{PlacementPolicy, ServiceLimits};

/// Whether each connection has no work and waits for no other connection.
fn connections_idle(rig: &TestTarget) -> Vec<bool> {
    rig.guests.iter().map(|guest| guest.is_idle()).collect()
}

#[test]
fn connection_waiting_for_memory_or_send_space_does_not_sleep() {
    let limits = ServiceLimits { memory_bytes: 260 << 10, connections_max: 3, ..service_limits() };
    let mut rig = TestTarget::with_options(limits, |config| config);
    let (_, cntlid) = rig.connect_admin_queue();
    let lines = [rig.connect_io_queue(cntlid, 1), rig.connect_io_queue(cntlid, 2)];
    assert_eq!(connections_idle(&rig), [true; 3], "nothing is asked of any");

    // The first connection has allocated all memory, and its host does not send the data.
    let (bytes, len) = (pattern(1, 128 << 10), 128 << 10);
    let write = read_or_write_command(IoOpcode::Write.code(), 0, 256);
    rig.lines[lines[0]].submit(&write, DataDirection::FromHost(len), &bytes);
    rig.lines[lines[0]].mute_after = Some(rig.lines[lines[0]].sent.len() + 72);
    let other = rig.lines[lines[1]].submit(&write, DataDirection::FromHost(len), &bytes);
    rig.run_until_idle();
    assert!(!rig.lines[lines[1]].done.contains_key(&other));
    assert!(!connections_idle(&rig)[2], "its memory may come back from a neighbour");
    assert!(connections_idle(&rig)[0]);
    rig.advance_time(Span::from_secs(31));
    assert!(rig.lines[lines[1]].done.contains_key(&other));
    assert!(connections_idle(&rig).iter().all(|can_park| *can_park), "{:?}", rig.guests);

    // A host that receives nothing.
    rig.lines[lines[1]].is_deaf = true;
    for _ in 0..20 {
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 256);
        rig.lines[lines[1]].submit(&read, DataDirection::ToHost(len), &[]);
    }
    rig.run_until_idle();
    assert!(connections_idle(&rig).iter().any(|can_park| !can_park));
}

#[test]
fn keep_alive_with_a_long_timeout_allows_coalesced_wakeups() {
    let keep_alive = Command::new(AdminOpcode::KeepAlive.code());
    for (kato, lingers) in [(10_000, true), (2_500, true), (2_400, false), (0, false)] {
        let mut rig = TestTarget::new();
        let line = rig.open_connection(admin_config());
        let connect = Connect { kato, ..admin_connect() };
        rig.execute_connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
        rig.set_property(line, offset::CC, ENABLED);
        let is_patient = |rig: &TestTarget| rig.guests[0].may_coalesce_wakeups();
        assert!(!is_patient(&rig), "it is at work");
        let (completion, _) = rig.execute_command(line, &keep_alive, DataDirection::None, &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        assert_eq!(is_patient(&rig), lingers, "{kato} ms");
        let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(127 << 16 | 2);
        rig.execute_command(line, &get.with_nsid(u32::MAX), DataDirection::ToHost(512), &[]);
        assert!(!is_patient(&rig), "it has asked for something");
        rig.execute_command(line, &keep_alive, DataDirection::None, &[]);
        assert_eq!(is_patient(&rig), lingers);
        rig.set_property(line, offset::CC, ENABLED);
        assert!(!is_patient(&rig), "a property too");
    }
}

#[test]
fn event_completion_disables_wakeup_coalescing() {
    let mut rig = TestTarget::new();
    let line = rig.open_connection(admin_config());
    let connect = Connect { kato: 10_000, ..admin_connect() };
    rig.execute_connect(line, &connect, &connect_data(CNTLID_DYNAMIC));
    rig.set_property(line, offset::CC, ENABLED);
    let events = Command::new(AdminOpcode::SetFeatures.code()).with_cdw10(0x0b);
    rig.execute_command(line, &events.with_cdw11(1 << 8), DataDirection::None, &[]);
    let request = Command::new(AdminOpcode::AsynchronousEventRequest.code());
    let reported = rig.lines[line].submit(&request, DataDirection::None, &[]);
    rig.run_until_idle();
    rig.execute_command(
        line,
        &Command::new(AdminOpcode::KeepAlive.code()),
        DataDirection::None,
        &[],
    );
    assert!(rig.guests[0].may_coalesce_wakeups());

    let medium = Arc::new(RamDevice::new(&rig.regions, 512, 64).unwrap());
    let namespace = NamespaceConfig { nsid: Some(9), ..NamespaceConfig::new(medium) };
    rig.service.add_namespace(NQN, namespace).unwrap();
    rig.run_until_idle();
    assert!(rig.lines[line].done.contains_key(&reported));
    assert!(!rig.guests[0].may_coalesce_wakeups());
}

#[test]
fn queue_without_commands_does_not_wake_for_its_counters() {
    let mut rig = TestTarget::new();
    let (_, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    let wakes_at = |rig: &TestTarget| rig.guests.last().unwrap().next_poll_time();
    assert_eq!(wakes_at(&rig), Instant::NEVER);
    for _ in 0..3 {
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
        let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(8 * 512), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
    }
    assert_eq!(wakes_at(&rig), Instant::NEVER);
}

#[test]
fn controller_is_busy_only_with_outstanding_commands() {
    let mut rig = TestTarget::new();
    let (admin, cntlid) = rig.connect_admin_queue();
    let io = rig.connect_io_queue(cntlid, 1);
    for _ in 0..3 {
        let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
        let (completion, _) = rig.execute_command(io, &read, DataDirection::ToHost(8 * 512), &[]);
        assert_eq!(completion.status(), Status::SUCCESS);
        rig.advance_time(Span::from_secs(100));
    }
    let get = Command::new(AdminOpcode::GetLogPage.code()).with_cdw10(127 << 16 | 2);
    let (completion, bytes) =
        rig.execute_command(admin, &get.with_nsid(u32::MAX), DataDirection::ToHost(512), &[]);
    assert_eq!(completion.status(), Status::SUCCESS);
    let health = HealthInformation::from_bytes(bytes.as_slice().try_into().unwrap());
    assert_eq!((health.host_read_commands(), health.controller_busy_minutes()), (3, 0));
}

/// Number of polls of each connection, in the order of their creation.
fn poll_counts(reactors: &Reactors) -> Vec<u64> {
    let sample = reactors.sample();
    let connections = sample.threads.iter().filter(|thread| thread.name.starts_with("tcp-"));
    connections.map(|thread| thread.pollers[0].polls).collect()
}

/// Waits until the reactor sleeps. Its published counters are up to date then.
fn wait_until_reactor_sleeps(reactors: &Reactors) {
    let until = reactors.clock().now().after(Span::from_secs(20));
    while !reactors.sample().reactors[0].sleeping {
        assert!(reactors.clock().now() < until, "it never sleeps");
        tenmil_linux::named_thread::yield_cpu();
    }
}

#[test]
fn idle_connections_are_not_polled_and_wake_on_input() {
    let (rig, clock) = (TestTarget::new(), Clock::start());
    let cores = CpuList::allowed_cpus().iter().take(1).collect();
    let reactors = Reactors::start_on_cores(&cores, &ReactorOptions::default(), &clock).unwrap();
    let (server, client) = start_server(&rig, &reactors, PlacementPolicy::default(), clock);
    let mut hosts: Vec<_> = (0..3).map(|_| connect_admin_queue(&client)).collect();
    let (_admin, mut busy) = connect_admin_queue(&client);
    let read = read_or_write_command(IoOpcode::Read.code(), 0, 8);
    let until = clock.now().after(Span::from_secs(20));
    // Connections are armed at one sleep and considered idle from the next one on.
    for round in 0.. {
        wait_until_reactor_sleeps(&reactors);
        let before = poll_counts(&reactors);
        for _ in 0..20 {
            let (completion, _) =
                client.execute_command(&mut busy, &read, DataDirection::ToHost(4096), &[]);
            assert_eq!(completion.status(), Status::SUCCESS);
            wait_until_reactor_sleeps(&reactors);
        }
        let after = poll_counts(&reactors);
        assert!(after[7] >= before[7] + 20, "the busy one is looked at");
        if after[..7] == before[..7] {
            break;
        }
        assert!(clock.now() < until, "round {round}: {before:?}, then {after:?}");
    }
    hosts.iter_mut().for_each(|(_, io)| write_and_read(&client, io));
    drop((hosts, busy));
    drop(server);
    reactors.stop();
    assert_eq!(rig.service.connection_count(), 0);
}
