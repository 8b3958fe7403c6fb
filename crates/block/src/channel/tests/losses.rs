//! Lost writes that a device reports once, to one of its channels.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};

use tenmil_base::{
    BlockDevice, ChannelWakeup, CompletionBatch, Durability, Error, Instant, IoChannel,
    IoCompletion, IoStatus, Limits, Operation, OperationSet, Request, Segment,
};
use tenmil_linux::Clock;

use super::late_device::request;
use crate::{Bdev, BdevDescriptor, BdevOptions, ChannelMode, Claim, PER_CHANNEL, QueueMap};

const NOW: Instant = Instant { ns: 1_000 };

/// A disk with a volatile cache: the next flush after a loss fails, on whichever channel it arrives.
#[derive(Clone, Default)]
struct LossyDisk {
    has_lost: Arc<AtomicBool>,
    /// Completions are held back.
    is_slow: Arc<AtomicBool>,
    /// Each channel reports a loss by itself.
    tells_each: bool,
    channels: Arc<Mutex<Vec<Arc<AtomicBool>>>>,
}

struct LossyDiskChannel {
    limits: Limits,
    disk: LossyDisk,
    has_lost: Arc<AtomicBool>,
    completions: VecDeque<IoCompletion>,
}

impl LossyDisk {
    fn lose(&self) {
        self.has_lost.store(!self.tells_each, Ordering::SeqCst);
        let channels = self.channels.lock().unwrap();
        channels.iter().for_each(|channel| channel.store(self.tells_each, Ordering::SeqCst));
    }
}

impl BlockDevice for LossyDisk {
    fn limits(&self) -> Limits {
        Limits {
            block_size: 512,
            metadata_size: 0,
            block_count: 64,
            request_blocks_max: 8,
            segments_max: 1,
            optimal_boundary_blocks: 0,
            atomic_write_blocks: 1,
            depth_max: 16,
            durability: Durability::VolatileCache,
            operations: OperationSet::from_operations(&Operation::ALL),
        }
    }

    fn channel(&self) -> Result<Box<dyn IoChannel>, Error> {
        let has_lost = Arc::new(AtomicBool::new(false));
        self.channels.lock().unwrap().push(Arc::clone(&has_lost));
        let (limits, disk, completions) = (self.limits(), self.clone(), VecDeque::new());
        Ok(Box::new(LossyDiskChannel { limits, disk, has_lost, completions }))
    }
}

impl IoChannel for LossyDiskChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _: Instant, requests: &[Request], _: &[Segment]) -> usize {
        for request in requests {
            let fails = request.operation == Operation::Flush
                && (self.disk.has_lost.swap(false, Ordering::SeqCst)
                    || self.has_lost.swap(false, Ordering::SeqCst));
            let status = if fails { IoStatus(0x4280) } else { IoStatus::SUCCESS };
            self.completions.push_back(IoCompletion { token: request.token, status, result: 0 });
        }
        requests.len()
    }

    fn poll(&mut self, _: Instant, completions: &mut CompletionBatch) -> usize {
        let is_slow = self.disk.is_slow.load(Ordering::SeqCst);
        let count = if is_slow { 0 } else { completions.remaining().min(self.completions.len()) };
        self.completions.drain(..count).for_each(|completion| completions.push(completion));
        count
    }
}

impl ChannelWakeup for LossyDiskChannel {}

/// Runs `test` for every mapping of channels to the device below.
fn run_on_each_queue_map(disk: &LossyDisk, test: impl Fn(&LossyDisk, &BdevDescriptor)) {
    for (map, mode) in [
        (QueueMap::with_default_contexts(PER_CHANNEL), ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::Mq),
        (QueueMap { read: 1, ..QueueMap::with_default_contexts(2) }, ChannelMode::Mq),
        (QueueMap::with_default_contexts(1), ChannelMode::SingleQueue),
    ] {
        let disk = LossyDisk { channels: Arc::default(), ..disk.clone() };
        let mut options = BdevOptions::new(Clock::on_kernel_clock(), 1);
        (options.map, options.mode, options.channels_max) = (map, mode, 4);
        let device = Bdev::new("disk0", Arc::new(disk.clone()), options).unwrap();
        test(&disk, &device.open(Claim::Exclusive, "test").unwrap());
    }
}

fn submit(client: &mut dyn IoChannel, operation: Operation, token: u64) {
    assert_eq!(client.submit(NOW, &[request(operation, token, 3)], &[]), 1);
    client.flush_submissions();
}

fn poll(client: &mut dyn IoChannel) -> Vec<(u64, bool)> {
    let mut completions = CompletionBatch::with_capacity(8);
    client.poll(NOW, &mut completions);
    let is_good = |completion: IoCompletion| {
        let is_fault = completion.status.0 & 0x7ff == IoStatus::WRITE_FAULT.0;
        assert!(completion.status.is_success() || is_fault, "{}", completion.status);
        (completion.token, !is_fault)
    };
    completions.drain().map(is_good).collect()
}

fn run_succeeds(client: &mut dyn IoChannel, operation: Operation) -> bool {
    submit(client, operation, 7);
    let completions = poll(client);
    assert_eq!(completions.len(), 1);
    completions[0].1
}

#[test]
fn loss_reported_to_one_client_fails_one_flush_of_every_other() {
    run_on_each_queue_map(&LossyDisk::default(), |disk, descriptor| {
        let mut clients = [(); 3].map(|()| descriptor.channel().unwrap());
        for round in 0..3 {
            for client in &mut clients {
                assert!(run_succeeds(&mut **client, Operation::Write));
            }
            disk.lose();
            for client in &mut clients {
                assert!(
                    run_succeeds(&mut **client, Operation::Read)
                        && run_succeeds(&mut **client, Operation::Write)
                );
                assert!(!run_succeeds(&mut **client, Operation::Flush), "round {round}");
            }
            for client in &mut clients {
                assert!(run_succeeds(&mut **client, Operation::Flush), "once: round {round}");
            }
        }
        disk.lose();
        assert!(!run_succeeds(&mut *clients[1], Operation::Flush));
        let mut later = descriptor.channel().unwrap();
        assert!(
            run_succeeds(&mut *later, Operation::Flush),
            "it has written nothing before the loss"
        );
    });
}

#[test]
fn loss_reported_per_channel_fails_one_flush_of_each() {
    run_on_each_queue_map(
        &LossyDisk { tells_each: true, ..LossyDisk::default() },
        |disk, descriptor| {
            let mut clients = [(); 3].map(|()| descriptor.channel().unwrap());
            for round in 0..3 {
                disk.lose();
                for expected in [false, true, true] {
                    for client in &mut clients {
                        assert_eq!(
                            run_succeeds(&mut **client, Operation::Flush),
                            expected,
                            "round {round}"
                        );
                    }
                }
            }
        },
    );
}

#[test]
fn flushes_in_flight_at_the_reported_loss_fail() {
    run_on_each_queue_map(&LossyDisk::default(), |disk, descriptor| {
        let clients = [(); 2].map(|()| descriptor.channel().unwrap());
        disk.is_slow.store(true, Ordering::SeqCst);
        disk.lose();
        let [mut one, mut other] = clients;
        for (operation, token) in [(Operation::Flush, 1), (Operation::Write, 2)] {
            submit(&mut *one, operation, token);
        }
        submit(&mut *one, Operation::Flush, 3);
        for (operation, token) in [(Operation::Flush, 4), (Operation::Read, 5)] {
            submit(&mut *other, operation, token);
        }
        submit(&mut *other, Operation::Flush, 6);
        disk.is_slow.store(false, Ordering::SeqCst);
        let (mut mine, mut others) = (poll(&mut *one), poll(&mut *other));
        mine.sort_unstable();
        others.sort_unstable();
        assert_eq!(mine, [(1, false), (2, true), (3, false)]);
        assert_eq!(others, [(4, false), (5, true), (6, false)]);
        assert!(
            run_succeeds(&mut *one, Operation::Flush)
                && run_succeeds(&mut *other, Operation::Flush)
        );
    });
}
