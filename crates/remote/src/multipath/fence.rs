//! An old controller that may still do what it was told is ended by another one (Cross-Controller
//! Reset, Base 2.3 §5.4.3), where both know the command.
//!
//! Nothing here makes anything unsafe: what is not said to be reset waits its time, as it would
//! without this. A controller that answers before it has reset the other one (Immediate Reset
//! Successful is 0) would say so in a log page later; that is not read, and its answer counts for
//! nothing.

use base::{Answer, Instant};
use wire::Typed;
use wire::admin::{CrossControllerReset, CrossResetResult};

use super::path::Path;

/// How far the end of a path's old controller is.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Fence {
    /// Which life of it may still do something.
    whom: Option<CrossControllerReset>,
    /// Paths whose controllers were asked, one bit each.
    tried: u32,
    /// The one whose answer is awaited, and under which token.
    asked: Option<(usize, u64)>,
}

/// Tokens of such commands, which no owner's command has: this one, and as many below it as there are
/// numbers for commands.
const TOKENS: u64 = u64::MAX - 1;

/// Asks other controllers to end the old ones of paths that were lost.
#[derive(Debug)]
pub(super) struct Fences {
    fences: Vec<Fence>,
    /// Commands that were sent.
    sent: u32,
}

impl Fences {
    pub(super) fn new(paths: usize) -> Self {
        Self { fences: vec![Fence::default(); paths], sent: 0 }
    }

    /// Sends what can be sent now.
    pub(super) fn turn(&mut self, now: Instant, paths: &mut [Path]) {
        for index in 0..paths.len() {
            let doubtful = paths[index].remote().and_then(|remote| remote.doubtful(now));
            let fence = &mut self.fences[index];
            if fence.whom != doubtful {
                *fence = Fence { whom: doubtful, ..Fence::default() };
            }
            // What was asked of a controller that is lost itself is not answered any more.
            fence.asked = fence.asked.filter(|(by, _)| paths[*by].access.is_some());
            let Some(whom) = fence.whom.filter(|_| fence.asked.is_none()) else { continue };
            for (by, path) in paths.iter_mut().enumerate() {
                if by == index || fence.tried >> by & 1 == 1 || path.access.is_none() {
                    continue;
                }
                let token = TOKENS - u64::from(self.sent);
                if ask(now, path, token, whom) {
                    self.sent = self.sent.wrapping_add(1);
                    fence.tried |= 1 << by;
                    fence.asked = Some((by, token));
                    break;
                }
            }
        }
    }

    /// Whether an answer is one to what was sent here.
    pub(super) fn is_theirs(answer: &Answer) -> bool {
        (TOKENS - u64::from(u32::MAX)..=TOKENS).contains(&answer.token)
    }

    /// A controller has answered. Which path's old controller is no more, if that is what it said.
    pub(super) fn handle(
        &mut self,
        paths: &mut [Path],
        by: usize,
        answer: &Answer,
    ) -> Option<usize> {
        let asked = Some((by, answer.token));
        let index = self.fences.iter().position(|fence| fence.asked == asked)?;
        let fence = &mut self.fences[index];
        fence.asked = None;
        let is_reset = answer.outcome.is_success() && CrossResetResult(answer.result).is_reset();
        let whom = fence.whom.filter(|_| is_reset)?;
        paths[index].remote()?.confirm_dead(whom).then_some(index)
    }
}

/// Sends it, if the controller knows it and has room for it now.
fn ask(now: Instant, path: &mut Path, token: u64, whom: CrossControllerReset) -> bool {
    let Some(remote) = path.remote() else { return false };
    let controller = remote.controller();
    let is_known = controller.identity().is_some_and(|identity| identity.page.ccrl() > 0);
    is_known && controller.submit_admin(now, token, whom.to_command(), None).is_ok()
}
