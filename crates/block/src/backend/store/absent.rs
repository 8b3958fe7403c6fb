//! In the place of a device that is not there: nothing on it can be read or written.

use base::{
    Answer, Answers, Backend, Instant, Limits, Medium, Outcome, Request, Segment, WakeSource,
};

use crate::backend::ready::Ready;

/// It says that it can do what another one can.
pub(super) struct Absent(pub(super) Limits);

struct AbsentChannel {
    limits: Limits,
    ready: Ready,
}

impl Medium for Absent {
    fn limits(&self) -> Limits {
        self.0.clone()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        let (limits, ready) = (self.0.clone(), Ready::with_depth(self.0.depth_max));
        Ok(Box::new(AbsentChannel { limits, ready }))
    }
}

impl Backend for AbsentChannel {
    fn limits(&self) -> &Limits {
        &self.limits
    }

    fn submit(&mut self, _now: Instant, requests: &[Request], _segments: &[Segment]) -> usize {
        let count = requests.len().min(self.ready.room());
        self.ready.extend(requests[..count].iter().map(|request| Answer {
            token: request.token,
            outcome: Outcome::UNRECOVERED_READ,
            result: 0,
        }));
        count
    }

    fn poll(&mut self, _now: Instant, answers: &mut Answers) -> usize {
        self.ready.give(answers)
    }

    fn wake_at(&self) -> Instant {
        if self.ready.len() > 0 { Instant::default() } else { Instant::NEVER }
    }

    fn wake_source(&self) -> WakeSource<'_> {
        WakeSource::Deadline
    }

    fn arm(&mut self) -> bool {
        self.ready.len() > 0
    }
}
