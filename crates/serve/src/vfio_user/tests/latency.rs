//! Expected latency of a client's commands, which determines how long a reactor in hybrid mode
//! sleeps.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use tenmil_base::{BlockDevice, Instant, Span};
use tenmil_dma::RegionTable;
use tenmil_drivers::{DelayDevice, DelaySettings, LatencySpec, RamDevice};
use tenmil_linux::socket_stream::{ListenAddress, StreamListener};
use tenmil_linux::{Clock, NamedThread};
use tenmil_reactor::Poller;

use super::test_client::{BLOCKS, DATA, IOVA, TestClient, admin_command};
use crate::vfio_user::ControllerOptions;
use crate::vfio_user::client_memory::DmaMappings;
use crate::vfio_user::endpoint::Endpoint;
use crate::vfio_user::irq_eventfds::IrqEventFds;
use crate::vfio_user::nvme_pci_function::NvmePciFunction;
use crate::vfio_user::poller::EndpointPoller;

/// Endpoint run by the test only, over a device with this latency, and a client of it.
fn endpoint_with_latency(takes: Span, clock: Clock) -> (EndpointPoller, TestClient) {
    let regions = RegionTable::new(16);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("socket");
    let listen_socket = StreamListener::open(&ListenAddress::Path(path.clone())).unwrap();
    let ram = Arc::new(RamDevice::new(&regions, 512, BLOCKS).unwrap());
    let slow = LatencySpec { mean: takes, p99: None };
    let medium = DelayDevice::new(ram, DelaySettings { read: slow, write: slow }, 1).unwrap();
    let media: Vec<Arc<dyn BlockDevice>> = vec![Arc::new(medium)];
    let (mappings, irqs) = (DmaMappings::new(regions.clone()), IrqEventFds::new(3));
    let options = ControllerOptions { queues: 2, ..ControllerOptions::default() };
    let device =
        NvmePciFunction::new(media, &options, &mappings, irqs.clone(), &regions, clock.now())
            .unwrap();
    let endpoint = Endpoint::new(device, mappings, irqs, regions, sync_channel(4).0);
    let mut host = EndpointPoller::new(listen_socket, endpoint).unwrap();
    let client = NamedThread::spawn("client", None, move |_: &tenmil_linux::StopFlag| {
        let mut machine = TestClient::connect(&path, clock);
        machine.await_reply(|reply| matches!(reply, tenmil_vfio_user::ClientEvent::Version(_)));
        machine.map_own_memory(true);
        machine.enable_controller();
        machine.create_io_queue();
        machine
    });
    let client = client.unwrap();
    while !client.is_finished() {
        host.poll_once(clock.now());
        tenmil_linux::named_thread::yield_cpu();
    }
    (host, client.join())
}

/// Runs the endpoint for a time span, in steps of a microsecond.
fn run_endpoint_for(host: &mut EndpointPoller, now: &mut Instant, span: Span) {
    let end = now.after(span);
    while *now < end {
        *now = now.after(Span::from_us(1));
        host.poll_once(*now);
    }
}

#[test]
fn expected_latency_is_known_only_with_outstanding_commands() {
    let clock = Clock::start();
    let takes = Span::from_us(80);
    let (mut host, mut machine) = endpoint_with_latency(takes, clock);
    let mut now = clock.now();
    assert_eq!(host.expected_latency(), None, "nothing is known yet");
    let place = u32::try_from(IOVA + DATA).unwrap();
    let read = |lba| admin_command(&[(0, 2), (1, 1), (6, place), (10, lba)]);
    for lba in 0..100 {
        machine.submit_command(1, read(lba));
        run_endpoint_for(&mut host, &mut now, Span::from_us(100));
        assert_eq!(machine.await_completion(1), 0);
        // Idle time between the commands does not count as latency.
        run_endpoint_for(&mut host, &mut now, Span::from_ms(3));
        assert_eq!(host.expected_latency(), None, "nothing is under way");
    }
    machine.submit_command(1, read(0));
    run_endpoint_for(&mut host, &mut now, Span::from_us(2));
    let latency = host.expected_latency().unwrap();
    assert!((78_000..=82_000).contains(&latency.ns), "{latency}");
    // Half of a fused pair that waits for the other half has no expected latency.
    run_endpoint_for(&mut host, &mut now, Span::from_us(100));
    assert_eq!(machine.await_completion(1), 0);
    machine.submit_command(1, admin_command(&[(0, 5 | 1 << 8), (1, 1), (6, place)]));
    run_endpoint_for(&mut host, &mut now, Span::from_us(100));
    assert_eq!(host.expected_latency(), None);
}
