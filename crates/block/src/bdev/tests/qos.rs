//! A device with all layers.

use std::num::NonZeroU64;

use tenmil_base::{BlockDevice, CompletionBatch, Instant, Operation, Request, Span};

use crate::channel::tests::bdev_over_late_device;
use crate::channel::tests::late_device::request;
use crate::{Claim, IoClass, QosLimiter, QosLimits, RateLimit};

#[test]
fn rate_limits_apply_to_all_channels_together() {
    let iops = NonZeroU64::new(1_000);
    let limiter = QosLimiter::new(QosLimits {
        total: RateLimit { iops, bytes: None },
        ..QosLimits::default()
    });
    let shared = limiter.clone();
    let (device, _) = bdev_over_late_device(64, |options| options.limiter = Some(shared));
    let descriptor =
        device.open(Claim::Exclusive, "test").unwrap().with_io_class(IoClass::Foreground);
    let mut channels = [descriptor.channel().unwrap(), descriptor.channel().unwrap()];
    let mut completed = 0;
    let mut now = Instant { ns: 1 };
    for _ in 0..2_000 {
        now = now.after(Span::from_ms(1));
        for channel in &mut channels {
            let reads: Vec<Request> =
                (0..8).map(|token| request(Operation::Read, token, 1)).collect();
            channel.submit(now, &reads, &[]);
            completed += channel.poll(now, &mut CompletionBatch::with_capacity(64));
        }
    }
    assert!((1_900..=2_100).contains(&completed), "{completed} in two seconds");
    let statistics = device.statistics();
    assert_eq!((statistics.limited, statistics.limit_wait), limiter.waits());
    // Sixteen requests at a time at two thousand per second, of which one per millisecond passes.
    let (limited, wait) = limiter.waits();
    assert!((1_000..=2_100).contains(&limited), "{limited} requests waited");
    assert!((20_000..=32_000).contains(&(wait.ns / 1_000_000)), "{wait}");
}
