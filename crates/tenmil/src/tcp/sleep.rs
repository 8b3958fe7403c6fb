//! What the thread of a queue sleeps on: one descriptor, which stands for the stream of the moment and
//! for a bell.

use std::os::fd::AsFd;
use std::sync::Arc;

use base::{Interrupts, Wake, WakeSource};
use host::EventVectors;
use host::watch::{Interest, Watch};
use remote::Sleep;

/// The descriptor.
pub(super) struct Pillow {
    watch: Watch,
    bell: EventVectors,
    /// Streams that were ever watched: their tokens.
    watched: u64,
}

struct Ring(EventVectors);

const READABLE: Interest = Interest { readable: true, writable: false };

impl Pillow {
    pub(super) fn new() -> std::io::Result<Self> {
        let (watch, bell) = (Watch::new()?, EventVectors::new(1)?);
        let descriptor = bell.descriptor(0).ok_or(std::io::ErrorKind::InvalidInput)?;
        watch.add(descriptor, 0, READABLE)?;
        Ok(Self { watch, bell, watched: 0 })
    }

    pub(super) fn descriptor(&self) -> &Watch {
        &self.watch
    }
}

impl Sleep for Pillow {
    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Descriptor(self.watch.as_fd())
    }

    fn watch(&mut self, stream: WakeSource<'_>) -> bool {
        let WakeSource::Descriptor(descriptor) = stream else { return false };
        self.watched += 1;
        // The stream of before is closed, and has left by that.
        self.watch.add(descriptor, self.watched, READABLE).is_ok()
    }

    fn bell(&self) -> Arc<dyn Wake + Send + Sync> {
        Arc::new(Ring(self.bell.clone()))
    }

    fn clear(&mut self) {
        self.bell.unmask(0);
    }
}

impl Wake for Ring {
    fn wake(&self) {
        self.0.clone().raise(0);
    }
}
