//! Devices that are served no more.
//!
//! To close one may take its time: a thread is joined, a controller shut down, a store written. The
//! last who has it may be a connection on a reactor, which must not wait for that. So it is kept here
//! until nobody else has it, and closed by whoever asks.

use block::Device;

/// Devices that are to be closed here.
#[derive(Default)]
pub(super) struct Leaving(Vec<Place>);

struct Place {
    device: Device,
    /// Whether nobody had it at the last look. Who has just let go of his claim may still be
    /// dropping the rest.
    is_free: bool,
}

impl Leaving {
    /// Keeps a device until it is free.
    pub(super) fn keep(&mut self, device: Device) {
        self.0.push(Place { device, is_free: false });
    }

    /// Closes what nobody has, at the second look that finds it so.
    pub(super) fn close(&mut self) {
        self.0.retain_mut(|place| {
            let was_free = place.is_free;
            place.is_free = place.device.holders().is_empty() && place.device.ways_open() == 0;
            !(was_free && place.is_free)
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use base::{Backend, Limits, Medium};
    use block::{Claim, Device, DeviceOptions, Null};
    use host::{Clock, Thread};

    use super::Leaving;

    /// Tells whether it was closed on the thread that it was made on.
    struct Shy {
        inner: Null,
        home: std::thread::ThreadId,
        is_closed_at_home: Arc<AtomicBool>,
    }

    impl Medium for Shy {
        fn limits(&self) -> Limits {
            self.inner.limits()
        }

        fn channel(&self) -> Result<Box<dyn Backend>, String> {
            self.inner.channel()
        }
    }

    impl Drop for Shy {
        fn drop(&mut self) {
            let is_home = std::thread::current().id() == self.home;
            self.is_closed_at_home.store(is_home, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_device_whose_last_channel_goes_elsewhere_is_closed_here() {
        let is_closed_at_home = Arc::new(AtomicBool::new(false));
        let shy = Shy {
            inner: Null::new(512, 8).unwrap(),
            home: std::thread::current().id(),
            is_closed_at_home: Arc::clone(&is_closed_at_home),
        };
        let options = DeviceOptions::new(Clock::start(), 1);
        let device = Device::new("shy", Arc::new(shy), options).unwrap();
        let descriptor = device.open(Claim::WriteOnce, "test").unwrap();
        let channel = descriptor.channel().unwrap();
        drop(descriptor);
        let mut leaving = Leaving::default();
        leaving.keep(device);
        leaving.close();
        leaving.close();
        assert_eq!(leaving.0.len(), 1, "a channel is open");
        Thread::spawn("elsewhere", None, move |_: &host::Stop| drop(channel)).unwrap().join();
        assert!(!is_closed_at_home.load(Ordering::SeqCst));
        leaving.close();
        leaving.close();
        assert!(leaving.0.is_empty());
        assert!(is_closed_at_home.load(Ordering::SeqCst));
    }
}
