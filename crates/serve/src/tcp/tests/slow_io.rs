//! Slow-I/O log.

use std::sync::Arc;

use tenmil_base::Span;
use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_nvme_controller::controller::NamespaceConfig;
use tenmil_nvme_tcp::DataDirection;
use tenmil_wire::{IoOpcode, Status};

use super::test_target::{BLOCKS, NQN, TestTarget, pattern, read_or_write_command};
use crate::{SlowIo, SlowIoStages, SlowIoThresholds};

/// Delay of the device.
const DEVICE: Span = Span::from_ms(20);

/// Target with a slow namespace, and an I/O queue of a host.
fn slow_target() -> (TestTarget, usize) {
    let (mut rig, subsystem) = TestTarget::with_subsystem();
    assert!(subsystem.remove_namespace(1));
    let ram = Arc::new(RamDevice::new(&rig.regions, 512, BLOCKS).unwrap());
    let slow = LatencySpec { mean: DEVICE, p99: None };
    let delay = DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap();
    let namespace = NamespaceConfig { nsid: Some(1), ..NamespaceConfig::new(Arc::new(delay)) };
    subsystem.add_namespace(namespace).unwrap();
    let (_, io) = rig.connect_host_with_io_queue(1);
    (rig, io)
}

fn set_threshold(rig: &mut TestTarget, default: Option<Span>) {
    let thresholds = SlowIoThresholds { default, ..SlowIoThresholds::default() };
    assert!(rig.service.set_slow_io(NQN, thresholds));
    rig.run_until_idle();
}

fn read(rig: &mut TestTarget, io: usize) {
    let read = read_or_write_command(IoOpcode::Read.code(), 8, 1);
    let tag = rig.lines[io].submit(&read, DataDirection::ToHost(512), &[]);
    rig.run_until_idle();
    rig.advance_time(DEVICE);
    assert_eq!(rig.lines[io].done.remove(&tag).unwrap().0.status(), Status::SUCCESS);
}

fn logged(rig: &TestTarget) -> Vec<SlowIo> {
    std::iter::from_fn(|| rig.service.slow_io_log().next_command()).collect()
}

#[test]
fn slow_write_is_logged_with_stages_that_add_up() {
    let (mut rig, io) = slow_target();
    set_threshold(&mut rig, Some(Span::from_ms(10)));
    let (len, transfer) = (64 << 10, Span::from_ms(3));
    let write = read_or_write_command(IoOpcode::Write.code(), 40, len / 512);
    let begin = rig.now;
    let tag = rig.lines[io].submit(&write, DataDirection::FromHost(len), &pattern(1, len as usize));
    rig.lines[io].poll_once(rig.now);
    rig.guests[io].poll_once(rig.now);
    // The data arrive 3 ms after they were requested.
    rig.now = rig.now.after(transfer);
    rig.run_until_idle();
    rig.advance_time(DEVICE);
    assert_eq!(rig.lines[io].done.remove(&tag).unwrap().0.status(), Status::SUCCESS);
    let [slow] = &logged(&rig)[..] else { panic!("one command was slow") };
    let expected = SlowIoStages {
        wait: Span::default(),
        transfer: Some(transfer),
        queue: Span::default(),
        device: DEVICE,
        send: Some(Span::default()),
    };
    assert_eq!((slow.received_at, slow.stages), (begin, expected));
    assert_eq!(slow.stages.total(), rig.now.since(begin));
    assert_eq!((slow.operation, slow.namespace, slow.start), ("Write", Some(1), Some(40)));
    assert_eq!(
        (slow.len_bytes, &slow.error, slow.source.export.as_str()),
        (len.into(), &None, NQN)
    );
    assert!(slow.source.queue.is_some_and(|(_, queue)| queue == 1), "{slow}");
}

#[test]
fn commands_below_the_threshold_and_without_one_are_not_logged() {
    let (mut rig, io) = slow_target();
    read(&mut rig, io);
    assert_eq!(logged(&rig), [], "there is no threshold");
    set_threshold(&mut rig, Some(Span { ns: DEVICE.ns + 1 }));
    read(&mut rig, io);
    assert_eq!(logged(&rig), [], "it is faster");
    set_threshold(&mut rig, Some(DEVICE));
    read(&mut rig, io);
    assert_eq!(logged(&rig).len(), 1, "the threshold counts as slow");
    set_threshold(&mut rig, None);
    read(&mut rig, io);
    assert_eq!(logged(&rig), [], "it was removed");
    let counts: Vec<u64> = rig.service.slow_io().into_iter().map(|(_, _, count)| count).collect();
    assert_eq!(counts, [1]);
}

#[test]
fn slow_command_whose_response_is_not_sent_is_logged_when_its_connection_ends() {
    let (mut rig, io) = slow_target();
    set_threshold(&mut rig, Some(Span::from_ms(10)));
    rig.traits.reads.store(true, std::sync::atomic::Ordering::Relaxed);
    // The kernel references the response of this queue until the end.
    let read = read_or_write_command(IoOpcode::Read.code(), 8, 1);
    rig.lines[io].submit(&read, DataDirection::ToHost(512), &[]);
    rig.run_until_idle();
    rig.advance_time(DEVICE);
    rig.guests.clear();
    let [slow] = &logged(&rig)[..] else { panic!("one command was slow") };
    assert_eq!((slow.stages.device, slow.stages.send), (DEVICE, None), "{slow}");
}
