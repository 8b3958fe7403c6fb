//! One wake source made of several, for backends that stand on several.

use std::os::fd::{AsFd, BorrowedFd};

use base::WakeSource;
use host::watch::{Interest, Watch};

const READABLE: Interest = Interest { readable: true, writable: false };

/// What wakes a thread that waits for any of several backends.
#[derive(Debug)]
pub(crate) enum Joined {
    /// One of them wakes nobody, so nothing does.
    Nothing,
    /// Time wakes for all of them.
    Deadline,
    /// Readable while a descriptor of any of them is.
    Descriptor(Watch),
}

impl Joined {
    /// Joins sources. A descriptor stays watched until it is closed, so the backends it belongs to
    /// go with this.
    pub(crate) fn of<'a>(
        sources: impl IntoIterator<Item = WakeSource<'a>>,
    ) -> Result<Self, String> {
        let mut descriptors: Vec<BorrowedFd<'a>> = Vec::new();
        for source in sources {
            match source {
                WakeSource::Nothing => return Ok(Self::Nothing),
                WakeSource::Deadline => {}
                WakeSource::Descriptor(descriptor) => descriptors.push(descriptor),
            }
        }
        if descriptors.is_empty() {
            return Ok(Self::Deadline);
        }
        let watch = || {
            let watch = Watch::new()?;
            for (descriptor, token) in descriptors.into_iter().zip(0..) {
                watch.add(descriptor, token, READABLE)?;
            }
            Ok(watch)
        };
        let watch = watch()
            .map_err(|error: std::io::Error| format!("join what wakes a device's legs: {error}"))?;
        Ok(Self::Descriptor(watch))
    }

    /// One source more. Where there is a descriptor already, it stays the one.
    ///
    /// # Errors
    ///
    /// What the kernel says; then it is as it was.
    pub(crate) fn add(&mut self, source: WakeSource<'_>) -> Result<(), String> {
        match (&*self, source) {
            (Self::Nothing, _) | (_, WakeSource::Deadline) => {}
            (Self::Descriptor(watch), WakeSource::Descriptor(descriptor)) => {
                let added = watch.add(descriptor, 0, READABLE);
                added.map_err(|error| format!("watch one more device: {error}"))?;
            }
            (Self::Deadline, _) | (_, WakeSource::Nothing) => *self = Self::of([source])?,
        }
        Ok(())
    }

    /// All of them as one.
    pub(crate) fn source(&self) -> WakeSource<'_> {
        match self {
            Self::Nothing => WakeSource::Nothing,
            Self::Deadline => WakeSource::Deadline,
            Self::Descriptor(descriptor) => WakeSource::Descriptor(descriptor.as_fd()),
        }
    }
}

#[cfg(test)]
mod tests {
    use base::{Interrupts, WakeSource};
    use host::{EventVectors, Sleeper};

    use super::Joined;

    #[test]
    fn one_that_wakes_nobody_makes_all_silent() {
        let vectors = EventVectors::new(1).unwrap();
        let descriptor = || WakeSource::Descriptor(vectors.descriptor(0).unwrap());
        let joined = Joined::of([descriptor(), WakeSource::Nothing]).unwrap();
        assert!(matches!(joined.source(), WakeSource::Nothing));
        let joined = Joined::of([WakeSource::Deadline, WakeSource::Deadline]).unwrap();
        assert!(matches!(joined.source(), WakeSource::Deadline));
        let joined = Joined::of([descriptor(), WakeSource::Deadline]).unwrap();
        assert!(matches!(joined.source(), WakeSource::Descriptor(_)));
    }

    #[test]
    fn any_of_several_descriptors_ends_a_sleep() {
        let mut vectors = EventVectors::new(3).unwrap();
        let sources = [0, 1, 2].map(|n| WakeSource::Descriptor(vectors.descriptor(n).unwrap()));
        let joined = Joined::of(sources).unwrap();
        let WakeSource::Descriptor(descriptor) = joined.source() else { panic!("{joined:?}") };
        let mut sleeper = Sleeper::new().unwrap();
        sleeper.sources().add(descriptor, 7).unwrap();
        for vector in 0..3 {
            let mut ready = Vec::new();
            sleeper.block(base::Span::default(), &mut ready);
            assert_eq!(ready, [], "before vector {vector}");
            assert!(vectors.unmask(vector));
            vectors.raise(vector);
            sleeper.block(base::Span::from_secs(10), &mut ready);
            assert_eq!(ready, [7], "vector {vector}");
            assert!(vectors.clear(vector));
        }
    }
}
