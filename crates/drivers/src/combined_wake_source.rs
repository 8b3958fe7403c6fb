//! Combined wake source of a channel over several channels.

use std::os::fd::{AsFd, BorrowedFd};
use tenmil_base::Error;

use tenmil_base::WakeSource;
use tenmil_linux::poll_set::{Interest, PollSet};

const READABLE: Interest = Interest { readable: true, writable: false };

/// Wake source over several channels.
#[derive(Debug)]
pub(crate) enum CombinedWakeSource {
    /// One of them has no wake source, so the thread must poll.
    Nothing,
    /// All of them wake by deadline.
    Deadline,
    /// Epoll descriptor over the descriptors of all.
    Descriptor(PollSet),
}

impl CombinedWakeSource {
    /// Combines sources. A descriptor stays in the epoll set until it is closed, so the channels must not
    /// outlive this.
    pub(crate) fn from_sources<'a>(
        sources: impl IntoIterator<Item = WakeSource<'a>>,
    ) -> Result<Self, Error> {
        let mut descriptors: Vec<BorrowedFd<'a>> = Vec::new();
        for source in sources {
            match source {
                WakeSource::None => return Ok(Self::Nothing),
                WakeSource::Deadline => {}
                WakeSource::Descriptor(descriptor) => descriptors.push(descriptor),
            }
        }
        if descriptors.is_empty() {
            return Ok(Self::Deadline);
        }
        let watch = || {
            let watch = PollSet::new()?;
            for (descriptor, token) in descriptors.into_iter().zip(0..) {
                watch.add(descriptor, token, READABLE)?;
            }
            Ok(watch)
        };
        let watch = watch()
            .map_err(|error: std::io::Error| format!("join what wakes a device's legs: {error}"))
            .map_err(Error::environment)?;
        Ok(Self::Descriptor(watch))
    }

    /// Adds a source. An existing descriptor remains the same.
    ///
    /// # Errors
    ///
    /// The kernel error; the source is then unchanged.
    pub(crate) fn add_source(&mut self, source: WakeSource<'_>) -> Result<(), Error> {
        match (&*self, source) {
            (Self::Nothing, _) | (_, WakeSource::Deadline) => {}
            (Self::Descriptor(watch), WakeSource::Descriptor(descriptor)) => {
                let added = watch.add(descriptor, 0, READABLE);
                added
                    .map_err(|error| format!("watch one more device: {error}"))
                    .map_err(Error::environment)?;
            }
            (Self::Deadline, _) | (_, WakeSource::None) => *self = Self::from_sources([source])?,
        }
        Ok(())
    }

    /// The combined source.
    pub(crate) fn source(&self) -> WakeSource<'_> {
        match self {
            Self::Nothing => WakeSource::None,
            Self::Deadline => WakeSource::Deadline,
            Self::Descriptor(descriptor) => WakeSource::Descriptor(descriptor.as_fd()),
        }
    }
}

#[cfg(test)]
mod tests {
    use tenmil_base::{Interrupts, WakeSource};
    use tenmil_linux::{EventFdVectors, Sleeper};

    use super::CombinedWakeSource;

    #[test]
    fn combination_with_a_none_source_is_none() {
        let vectors = EventFdVectors::new(1).unwrap();
        let descriptor = || WakeSource::Descriptor(vectors.descriptor(0).unwrap());
        let joined = CombinedWakeSource::from_sources([descriptor(), WakeSource::None]).unwrap();
        assert!(matches!(joined.source(), WakeSource::None));
        let joined =
            CombinedWakeSource::from_sources([WakeSource::Deadline, WakeSource::Deadline]).unwrap();
        assert!(matches!(joined.source(), WakeSource::Deadline));
        let joined =
            CombinedWakeSource::from_sources([descriptor(), WakeSource::Deadline]).unwrap();
        assert!(matches!(joined.source(), WakeSource::Descriptor(_)));
    }

    #[test]
    fn any_combined_descriptor_makes_the_epoll_descriptor_readable() {
        let mut vectors = EventFdVectors::new(3).unwrap();
        let sources = [0, 1, 2].map(|n| WakeSource::Descriptor(vectors.descriptor(n).unwrap()));
        let joined = CombinedWakeSource::from_sources(sources).unwrap();
        let WakeSource::Descriptor(descriptor) = joined.source() else { panic!("{joined:?}") };
        let mut sleeper = Sleeper::new().unwrap();
        sleeper.sources().add_source(descriptor, 7).unwrap();
        for vector in 0..3 {
            let mut ready = Vec::new();
            sleeper.sleep_until_ready(tenmil_base::Span::default(), &mut ready);
            assert_eq!(ready, [], "before vector {vector}");
            assert!(vectors.unmask(vector));
            vectors.raise(vector);
            sleeper.sleep_until_ready(tenmil_base::Span::from_secs(10), &mut ready);
            assert_eq!(ready, [7], "vector {vector}");
            assert!(vectors.clear_signals(vector));
        }
    }
}
