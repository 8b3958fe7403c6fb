//! Channels of a device that is absent when they are opened.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};

use tenmil_base::{
    BlockDevice, CompletionBatch, Instant, IoChannel, IoStatus, Operation, Request, Span,
};
use tenmil_linux::Clock;
use tenmil_nvme_fabrics::{TimeoutPolicy, WaitHandle};

use super::{QueueSource, RemoteDevice, SizeWatch};
use crate::tcp::reservations::{ReservationQueue, ReservedNamespace};
use tenmil_base::Error;

/// A device that is connected or not.
struct Device {
    is_up: Arc<AtomicBool>,
    counts: Arc<Counts>,
    clock: Clock,
    policy: TimeoutPolicy,
    growth: SizeWatch,
    medium: tenmil_drivers::NullDevice,
}

#[derive(Default)]
struct Counts {
    submitted: AtomicU32,
    closed: AtomicU32,
}

impl QueueSource for Device {
    type Queue = Box<dyn IoChannel>;
    type Ticket = u32;

    fn open_queue(&self) -> Result<u32, Error> {
        Ok(7)
    }

    fn take_queue(&self, ticket: u32) -> Result<Option<Box<dyn IoChannel>>, Error> {
        assert_eq!(ticket, 7);
        self.counts.submitted.fetch_add(1, Ordering::Relaxed);
        let is_up = self.is_up();
        Ok(is_up.then(|| self.medium.channel().unwrap()))
    }

    fn close_queue(&self, _: u32) {
        self.counts.closed.fetch_add(1, Ordering::Relaxed);
    }

    fn is_up(&self) -> bool {
        self.is_up.load(Ordering::Relaxed)
    }

    fn with_wait_handle(queue: Box<dyn IoChannel>, _: Box<dyn WaitHandle>) -> Box<dyn IoChannel> {
        queue
    }

    fn clock(&self) -> (&Clock, &TimeoutPolicy) {
        (&self.clock, &self.policy)
    }

    fn address(&self) -> &'static str {
        "192.0.2.7:4420"
    }

    fn queues_max(&self) -> u32 {
        4
    }

    fn supports_kernel_buffers(&self) -> Result<u32, Error> {
        Ok(1)
    }

    fn failure(&self) -> Option<String> {
        None
    }

    fn identity(&self) -> Option<String> {
        None
    }

    fn reserved(&self) -> Option<ReservedNamespace> {
        None
    }

    fn reservation_queue(&self) -> Result<ReservationQueue, Error> {
        Err(Error::usage("no reservations"))
    }

    fn growth(&self) -> &SizeWatch {
        &self.growth
    }

    fn abandon(&self, _: &mut Box<dyn IoChannel>) -> bool {
        true
    }
}

/// A medium whose first queue is taken and whose device is gone by now.
fn absent() -> (RemoteDevice<Device>, Arc<AtomicBool>, Arc<Counts>) {
    let (is_up, counts) = (Arc::new(AtomicBool::new(true)), Arc::<Counts>::default());
    let device = Device {
        is_up: Arc::clone(&is_up),
        counts: Arc::clone(&counts),
        clock: Clock::on_kernel_clock(),
        policy: TimeoutPolicy { fail_fast: Span::from_secs(2), ..TimeoutPolicy::default() },
        growth: SizeWatch::default(),
        medium: tenmil_drivers::NullDevice::new(512, 1 << 20).unwrap(),
    };
    let medium = RemoteDevice::new(device).unwrap();
    drop(medium.channel().unwrap());
    is_up.store(false, Ordering::Relaxed);
    counts.submitted.store(0, Ordering::Relaxed);
    (medium, is_up, counts)
}

fn read(token: u64) -> Request {
    Request { random_token: token, operation: Operation::Read, ..Request::PLACEHOLDER }
}

fn at(ms: u64) -> Instant {
    Instant::default().after(Span::from_secs(100)).after(Span::from_ms(ms))
}

#[test]
fn channel_to_an_absent_device_opens_without_waiting_and_works_once_it_is_back() {
    let (medium, is_up, counts) = absent();
    let mut channel = medium.channel().unwrap();
    assert_eq!(counts.submitted.load(Ordering::Relaxed), 0, "the caller waits for no connection");
    assert_eq!(channel.limits(), &medium.limits());
    assert_eq!(channel.submit(at(0), &[read(3)], &[]), 0);
    assert!(channel.wake_at() <= at(10), "nobody tells that there is a queue by now");
    is_up.store(true, Ordering::Relaxed);
    assert_eq!(channel.submit(at(10), &[read(3)], &[]), 1);
    let mut completions = CompletionBatch::with_capacity(4);
    assert_eq!(channel.poll(at(10), &mut completions), 1);
    let completion = completions.drain().next().unwrap();
    assert_eq!((completion.token, completion.status), (3, IoStatus::SUCCESS));
    drop(channel);
    assert_eq!(counts.closed.load(Ordering::Relaxed), 0);
}

#[test]
fn requests_to_an_absent_device_fail_after_fail_fast_and_work_once_it_is_back() {
    let (medium, is_up, _counts) = absent();
    let mut channel = medium.channel().unwrap();
    let mut completions = CompletionBatch::with_capacity(4);
    assert_eq!(channel.submit(at(0), &[read(1)], &[]), 0);
    assert_eq!(channel.submit(at(1999), &[read(1)], &[]), 0);
    assert_eq!(channel.submit(at(2000), &[read(1), read(2)], &[]), 2);
    assert!(channel.arm(), "there are answers");
    assert_eq!(channel.wake_at(), Instant::default());
    // The queue is not taken before they were given.
    is_up.store(true, Ordering::Relaxed);
    assert_eq!(channel.submit(at(2010), &[read(4)], &[]), 1);
    assert_eq!(channel.poll(at(2010), &mut completions), 3);
    assert!(completions.drain().all(|completion| completion.status == IoStatus::PATH_ERROR));
    assert!(!channel.arm());
    assert_eq!(channel.submit(at(2020), &[read(3)], &[]), 1);
    assert_eq!(channel.poll(at(2020), &mut completions), 1);
    assert_eq!(completions.drain().next().unwrap().status, IoStatus::SUCCESS);
}

#[test]
fn channel_that_is_dropped_before_it_has_a_queue_gives_it_up() {
    let (medium, _, counts) = absent();
    drop(medium.channel().unwrap());
    assert_eq!(counts.closed.load(Ordering::Relaxed), 1);
}
