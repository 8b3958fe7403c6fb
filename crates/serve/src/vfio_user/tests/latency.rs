//! Expected latency of a client's commands, which determines how long a reactor in hybrid mode
//! sleeps.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use tenmil_base::{BlockDevice, Instant, Span};
use tenmil_dma::RegionTable;
use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_linux::stream::{Address, StreamListener};
use tenmil_linux::{Clock, Thread};
use tenmil_reactor::Poller;

use super::rig::{BLOCKS, DATA, IOVA, Machine, command};
use crate::vfio_user::DeviceOptions;
use crate::vfio_user::device::Device;
use crate::vfio_user::endpoint::Endpoint;
use crate::vfio_user::irq::IrqEventFds;
use crate::vfio_user::memory::DmaMappings;
use crate::vfio_user::poller::EndpointPoller;

/// Endpoint run by the test only, over a device with this latency, and a client of it.
fn of(takes: Span, clock: Clock) -> (EndpointPoller, Machine) {
    let regions = RegionTable::new(16);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let listen_socket = StreamListener::open(&Address::Path(path.clone())).unwrap();
    let ram = Arc::new(RamDevice::new(&regions, 512, BLOCKS).unwrap());
    let slow = LatencySpec { mean: takes, p99: None };
    let medium = DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap();
    let media: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(medium)];
    let (mappings, irqs) = (DmaMappings::new(regions.clone()), IrqEventFds::new(3));
    let options = DeviceOptions { queues: 2, ..DeviceOptions::default() };
    let device =
        Device::new(media, &options, &mappings, irqs.clone(), &regions, clock.now()).unwrap();
    let endpoint = Endpoint::new(device, mappings, irqs, regions, sync_channel(4).0);
    let mut host = EndpointPoller::new(listen_socket, endpoint).unwrap();
    let client = Thread::spawn("client", None, move |_: &tenmil_linux::StopFlag| {
        let mut machine = Machine::connect(&path, clock);
        machine.wait(|reply| matches!(reply, tenmil_vfio_user::ClientEvent::Version(_)));
        machine.map(true);
        machine.enable();
        machine.make_queue();
        machine
    });
    let client = client.unwrap();
    while !client.is_finished() {
        host.poll_all(clock.now());
        tenmil_linux::thread::yield_now();
    }
    (host, client.join())
}

/// Runs the endpoint for a time span, in steps of a microsecond.
fn pass(host: &mut EndpointPoller, now: &mut Instant, span: Span) {
    let end = now.after(span);
    while *now < end {
        *now = now.after(Span::from_us(1));
        host.poll_all(*now);
    }
}

#[test]
fn a_device_knows_what_its_commands_take_while_there_are_any() {
    let clock = Clock::start();
    let takes = Span::from_us(80);
    let (mut host, mut machine) = of(takes, clock);
    let mut now = clock.now();
    assert_eq!(host.expected_latency(), None, "nothing is known yet");
    let place = u32::try_from(IOVA + DATA).unwrap();
    let read = |lba| command(&[(0, 2), (1, 1), (6, place), (10, lba)]);
    for lba in 0..100 {
        machine.submit(1, read(lba));
        pass(&mut host, &mut now, Span::from_us(100));
        assert_eq!(machine.complete(1), 0);
        // Idle time between the commands does not count as latency.
        pass(&mut host, &mut now, Span::from_ms(3));
        assert_eq!(host.expected_latency(), None, "nothing is under way");
    }
    machine.submit(1, read(0));
    pass(&mut host, &mut now, Span::from_us(2));
    let latency = host.expected_latency().unwrap();
    assert!((78_000..=82_000).contains(&latency.ns), "{latency}");
    // Half of a fused pair that waits for the other half has no expected latency.
    pass(&mut host, &mut now, Span::from_us(100));
    assert_eq!(machine.complete(1), 0);
    machine.submit(1, command(&[(0, 5 | 1 << 8), (1, 1), (6, place)]));
    pass(&mut host, &mut now, Span::from_us(100));
    assert_eq!(host.expected_latency(), None);
}
