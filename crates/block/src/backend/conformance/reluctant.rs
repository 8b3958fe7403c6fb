//! A medium that takes little and gives little, which it may.

use std::sync::{Arc, Mutex};

use base::{
    Answers, Backend, DoorbellCounts, Extent, Instant, Limits, Medium, Random, Request, Segment,
    WakeSource,
};

use crate::{Kind, MediumError, Opened, Opener, uri::Uri};

/// Takes between none and three requests of each batch, and often answers later than it could.
pub(crate) struct Reluctant {
    inner: Arc<dyn Medium>,
    random: Mutex<Random>,
}

struct ReluctantChannel {
    inner: Box<dyn Backend>,
    random: Random,
}

/// Opens `reluctant:[URI]`.
pub(super) struct ReluctantKind;

impl Reluctant {
    pub(crate) fn new(inner: Arc<dyn Medium>, seed: u64) -> Self {
        Self { inner, random: Mutex::new(Random::new(seed)) }
    }
}

impl Kind for ReluctantKind {
    fn open(&self, opener: &Opener<'_>, uri: &Uri) -> Result<Opened, MediumError> {
        let below = opener.open(uri.only_child()?)?;
        let medium = Reluctant::new(below.medium.clone(), opener.seed);
        let description = format!("reluctant: over {}", below.description);
        Ok(below.under(Arc::new(medium), description))
    }
}

impl Medium for Reluctant {
    fn limits(&self) -> Limits {
        self.inner.limits()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let random = self.random.lock().unwrap().fork();
        Ok(Box::new(ReluctantChannel { inner: self.inner.channel()?, random }))
    }

    fn channels_max(&self) -> u32 {
        self.inner.channels_max()
    }

    fn extent(&self, lba: u64) -> Result<Extent, String> {
        self.inner.extent(lba)
    }
}

impl Backend for ReluctantChannel {
    fn limits(&self) -> &Limits {
        self.inner.limits()
    }

    fn submit(&mut self, now: Instant, requests: &[Request], segments: &[Segment]) -> usize {
        let most = usize::try_from(self.random.below(4)).unwrap();
        self.inner.submit(now, &requests[..requests.len().min(most)], segments)
    }

    fn flush(&mut self) {
        self.inner.flush();
    }

    fn poll(&mut self, now: Instant, answers: &mut Answers) -> usize {
        if self.random.chance(1, 3) { 0 } else { self.inner.poll(now, answers) }
    }

    fn doorbells(&self) -> DoorbellCounts {
        self.inner.doorbells()
    }

    fn wake_at(&self) -> Instant {
        self.inner.wake_at()
    }

    fn wake_source(&self) -> WakeSource<'_> {
        self.inner.wake_source()
    }

    fn arm(&mut self) -> bool {
        self.inner.arm()
    }

    fn disarm(&mut self) {
        self.inner.disarm();
    }
}
