//! What a client's commands take, so that a reactor in hybrid mode knows how long it may rest.

use std::sync::Arc;
use std::sync::mpsc::sync_channel;

use base::{Instant, Medium, Span};
use block::{Delay, Delays, Ram, Spread};
use dma::Regions;
use host::stream::{Address, Door};
use host::{Clock, Thread};
use reactor::Poller;

use super::rig::{BLOCKS, DATA, IOVA, Machine, command};
use crate::vfu::DeviceOptions;
use crate::vfu::device::Device;
use crate::vfu::guest::Guest;
use crate::vfu::lines::Lines;
use crate::vfu::memory::Maps;
use crate::vfu::poller::Host;

/// A host that nobody turns but the test, of a medium that takes so long, and a client of it.
fn of(takes: Span, clock: Clock) -> (Host, Machine) {
    let regions = Regions::new(16);
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("door");
    let door = Door::open(&Address::Path(path.clone())).unwrap();
    let ram = Arc::new(Ram::new(&regions, 512, BLOCKS).unwrap());
    let slow = Spread { mean: takes, p99: None };
    let medium = Delay::new(ram, Delays { read: slow, write: slow }, 1).unwrap();
    let media: Vec<Arc<dyn Medium>> = vec![Arc::new(medium)];
    let (maps, lines) = (Maps::new(regions.clone()), Lines::new(3));
    let options = DeviceOptions { queues: 2, ..DeviceOptions::default() };
    let device = Device::new(media, &options, &maps, lines.clone(), &regions, clock.now()).unwrap();
    let guest = Guest::new(device, maps, lines, regions, sync_channel(4).0);
    let mut host = Host::new(door, guest).unwrap();
    let client = Thread::spawn("client", None, move |_: &host::Stop| {
        let mut machine = Machine::connect(&path, clock);
        machine.wait(|answer| matches!(answer, vfu::Answer::Version(_)));
        machine.map(true);
        machine.enable();
        machine.make_queue();
        machine
    });
    let client = client.unwrap();
    while !client.is_finished() {
        host.work(clock.now());
        host::thread::give_way();
    }
    (host, client.join())
}

/// Turns the host for so long, a microsecond at a time.
fn pass(host: &mut Host, now: &mut Instant, span: Span) {
    let end = now.after(span);
    while *now < end {
        *now = now.after(Span::from_us(1));
        host.work(*now);
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
        // A client that asks for nothing does not make its commands slow.
        pass(&mut host, &mut now, Span::from_ms(3));
        assert_eq!(host.expected_latency(), None, "nothing is under way");
    }
    machine.submit(1, read(0));
    pass(&mut host, &mut now, Span::from_us(2));
    let latency = host.expected_latency().unwrap();
    assert!((78_000..=82_000).contains(&latency.ns), "{latency}");
    // Half a pair that waits for the other is not under way, and nobody rests for it.
    pass(&mut host, &mut now, Span::from_us(100));
    assert_eq!(machine.complete(1), 0);
    machine.submit(1, command(&[(0, 5 | 1 << 8), (1, 1), (6, place)]));
    pass(&mut host, &mut now, Span::from_us(100));
    assert_eq!(host.expected_latency(), None);
}
