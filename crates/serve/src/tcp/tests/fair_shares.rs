//! One host with many queues and a high depth beside fifteen others, on a device that is the bottleneck.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Error, Instant, IoChannel, IoCompletion, IoStatus,
    Limits, Request, Segment, Span,
};
use tenmil_drivers::NullDevice;
use tenmil_nvme_controller::controller::{NamespaceConfig, Subsystem, SubsystemConfig};
use tenmil_nvme_tcp::{Connection, DataDirection};
use tenmil_wire::fabrics::{CNTLID_DYNAMIC, ConnectData};
use tenmil_wire::layout::Ascii;
use tenmil_wire::register::offset;
use tenmil_wire::{IoOpcode, Status};

use super::test_target::{
    BLOCKS, ENABLED, NQN, TestTarget, admin_config, admin_connect, connect_data, io_config,
    io_connect, read_or_write_command, service_limits,
};
use crate::tcp::{ServiceLimits, SubsystemExportConfig};

/// Device that executes this many requests at a time, in the order of their arrival, each in a millisecond.
#[derive(Debug)]
struct NarrowDevice {
    null: NullDevice,
    /// When each unit is free again.
    units: Arc<Mutex<BinaryHeap<Reverse<Instant>>>>,
}

struct NarrowChannel {
    inner: Box<dyn IoChannel>,
    units: Arc<Mutex<BinaryHeap<Reverse<Instant>>>>,
    due: BinaryHeap<Reverse<(Instant, u64)>>,
}

const SERVICE: Span = Span::from_ms(1);
const STEP: Span = Span::from_us(100);

impl NarrowDevice {
    fn new(units: usize) -> Self {
        let null = NullDevice::new(512, BLOCKS).unwrap();
        let units = vec![Reverse(Instant::default()); units].into();
        Self { null, units: Arc::new(Mutex::new(units)) }
    }
}

impl BlockDevice for NarrowDevice {
    fn limits(&self) -> Limits {
        self.null.limits()
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let (inner, units) = (self.null.channel()?, Arc::clone(&self.units));
        Ok(Box::new(NarrowChannel { inner, units, due: BinaryHeap::new() }))
    }
}

impl IoChannel for NarrowChannel {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], _: &[Segment]) -> usize {
        let mut units = self.units.lock().unwrap();
        for request in requests {
            let Reverse(free) = units.pop().unwrap();
            let end = free.max(now).after(SERVICE);
            units.push(Reverse(end));
            self.due.push(Reverse((end, request.token)));
        }
        requests.len()
    }

    fn poll(&mut self, now: Instant, completions: &mut CompletionBatch) -> usize {
        let mut count = 0;
        while let Some(Reverse((at, token))) = self.due.peek().copied()
            && at <= now
            && completions.remaining() > 0
        {
            self.due.pop();
            completions.push(IoCompletion { token, status: IoStatus::SUCCESS, result: 0 });
            count += 1;
        }
        count
    }
}

impl ChannelWakeup for NarrowChannel {}

/// Host with its queues, each with `depth` commands.
struct LoadedHost {
    lines: Vec<usize>,
    depth: usize,
}

fn connect_host(rig: &mut TestTarget, number: u8, queues: u16) -> Vec<usize> {
    let nqn = format!("nqn.2026-01.org.tenmil:host-{number}");
    let data = |cntlid| -> ConnectData {
        connect_data(cntlid)
            .with(|data| data.hostid([number + 1; 16]).hostnqn(Ascii::nul_padded(&nqn)))
    };
    let admin = rig.open_connection(admin_config());
    let done = rig.execute_connect(admin, &admin_connect(), &data(CNTLID_DYNAMIC));
    assert_eq!(done.status(), Status::SUCCESS);
    rig.set_property(admin, offset::CC, ENABLED);
    let cntlid = u16::try_from(done.dw0()).unwrap();
    (1..=queues)
        .map(|qid| {
            let line = rig.open_connection(io_config());
            let done = rig.execute_connect(line, &io_connect(qid), &data(cntlid));
            assert_eq!(done.status(), Status::SUCCESS);
            line
        })
        .collect()
}

/// Commands that each host completes in some milliseconds, after it was loaded for as long before.
fn completed(rig: &mut TestTarget, hosts: &[LoadedHost], ms: u64) -> Vec<usize> {
    let mut counts = vec![0; hosts.len()];
    let steps = ms * 1_000_000 / STEP.ns;
    for step in 0..2 * steps {
        for (host, count) in hosts.iter().zip(&mut counts) {
            for line in &host.lines {
                let done = std::mem::take(&mut rig.lines[*line].done);
                *count += if step < steps { 0 } else { done.len() };
                while rig.lines[*line].end.outstanding_tags().count() < host.depth {
                    let read = read_or_write_command(IoOpcode::Read.code(), 0, 1);
                    rig.lines[*line].submit(&read, DataDirection::ToHost(512), &[]);
                }
            }
        }
        rig.advance_time(STEP);
    }
    counts
}

/// Service rates of fifteen hosts at a depth and of a sixteenth: at the same depth, and then as a noisy
/// one.
fn measure(fair_depth: u32, units: usize, depth: usize) -> [Vec<usize>; 2] {
    let limits = ServiceLimits {
        fair_depth,
        memory_bytes: 32 << 20,
        connections_max: 64,
        io_queues_max: 8,
        ..service_limits()
    };
    let mut rig = TestTarget::with_options(limits, |config| {
        let namespaces = vec![NamespaceConfig::new(Arc::new(NarrowDevice::new(units)))];
        let subsystem =
            SubsystemConfig { nqn: NQN.to_owned(), ..SubsystemConfig::new("S", namespaces) };
        SubsystemExportConfig { subsystem: Subsystem::new(subsystem).unwrap(), ..config }
    });
    let mut hosts: Vec<LoadedHost> = (0..15)
        .map(|number| LoadedHost { lines: connect_host(&mut rig, number, 1), depth })
        .collect();
    let lines = connect_host(&mut rig, 15, 8);
    hosts.push(LoadedHost { lines: lines[..1].to_vec(), depth });
    let before = completed(&mut rig, &hosts, 160);
    hosts.pop();
    hosts.push(LoadedHost { lines, depth: 120 });
    let after = completed(&mut rig, &hosts, 160);
    rig.lines.clear();
    for _ in 0..100 {
        rig.advance_time(Span::from_ms(10));
    }
    rig.assert_all_released();
    [before, after]
}

/// Lowest share of its former rate that one of the fifteen keeps, in percent.
fn lowest_share(before: &[usize], after: &[usize]) -> usize {
    let of = |(before, after): (&usize, &usize)| after * 100 / before;
    before.iter().zip(after).take(15).map(of).min().unwrap()
}

#[test]
fn fifteen_hosts_keep_their_rates_beside_a_noisy_one() {
    for (units, depth) in [(8, 4), (32, 4), (64, 4), (16, 8)] {
        let [before, after] = measure(64, units, depth);
        let share = lowest_share(&before, &after);
        assert!(share >= 80, "{units} units: {before:?}, then {after:?}");
        // The device is as busy as before, and the noisy host has at least its equal share.
        let [total_before, total_after]: [usize; 2] = [before.iter().sum(), after.iter().sum()];
        assert!(total_after * 100 >= total_before * 97, "{units} units: {before:?}, {after:?}");
        assert!(after[15] * 100 >= before[15] * 95, "{units} units: {before:?}, then {after:?}");
    }
}

#[test]
fn without_a_fair_depth_the_noisy_host_displaces_the_others() {
    let [before, after] = measure(0, 8, 4);
    assert!(lowest_share(&before, &after) < 20, "{before:?}, then {after:?}");
}

#[test]
fn single_host_has_the_whole_device() {
    let [_, after] = measure(64, 512, 0);
    // 512 units for a millisecond each, in 160 ms.
    assert!(after[15] >= 512 * 156, "{after:?}");
    assert_eq!(after[0], 0, "the others are idle");
}
