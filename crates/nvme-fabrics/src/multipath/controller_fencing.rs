//! Fencing: an old controller that may still execute commands is reset by another one (Cross-Controller
//! Reset, NVM Express Base 2.3, section 5.4.3), if both support the command.
//!
//! Fencing is an optimization: if the reset is not confirmed, the requests wait as without it. A
//! controller that completes the command before the reset (Immediate Reset Successful is 0) would report
//! the result in a log page later. That page is not read, and such a completion is ignored.

use tenmil_base::{Instant, IoCompletion};
use tenmil_wire::TypedCommand;
use tenmil_wire::admin::{CrossControllerReset, CrossResetResult};

use super::path::Path;

/// Progress of fencing the old controller of a path.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ControllerFencingState {
    /// The instance that may still execute commands.
    old_controller: Option<CrossControllerReset>,
    /// Bit mask of paths whose controllers have received the reset request.
    tried_paths: u32,
    /// The path whose completion is awaited, and its token.
    pending: Option<(usize, u64)>,
}

/// The highest token of these commands, followed by 2^32 lower ones; commands of the owner use none of
/// them.
const TOKEN_MAX: u64 = u64::MAX - 1;

/// Requests resets of the old controllers of lost paths.
#[derive(Debug)]
pub(super) struct ControllerFencing {
    fences: Vec<ControllerFencingState>,
    /// Number of commands sent.
    sent: u32,
}

impl ControllerFencing {
    pub(super) fn new(paths: usize) -> Self {
        Self { fences: vec![ControllerFencingState::default(); paths], sent: 0 }
    }

    /// Sends the commands that can be sent now.
    pub(super) fn poll(&mut self, now: Instant, paths: &mut [Path]) {
        for index in 0..paths.len() {
            let fencing_target = paths[index]
                .connected_controller()
                .and_then(|remote| remote.controller_to_fence(now));
            let fence = &mut self.fences[index];
            if fence.old_controller != fencing_target {
                *fence = ControllerFencingState {
                    old_controller: fencing_target,
                    ..ControllerFencingState::default()
                };
            }
            // A command to a controller that was lost itself does not complete any more.
            fence.pending = fence.pending.filter(|(by, _)| paths[*by].access.is_some());
            let Some(old_controller) = fence.old_controller.filter(|_| fence.pending.is_none())
            else {
                continue;
            };
            for (by, path) in paths.iter_mut().enumerate() {
                if by == index || fence.tried_paths >> by & 1 == 1 || path.access.is_none() {
                    continue;
                }
                let token = TOKEN_MAX - u64::from(self.sent);
                if send_reset(now, path, token, old_controller) {
                    self.sent = self.sent.wrapping_add(1);
                    fence.tried_paths |= 1 << by;
                    fence.pending = Some((by, token));
                    break;
                }
            }
        }
    }

    /// Whether a completion belongs to one of these commands.
    pub(super) fn is_reset_completion(completion: &IoCompletion) -> bool {
        (TOKEN_MAX - u64::from(u32::MAX)..=TOKEN_MAX).contains(&completion.token)
    }

    /// Handles a completion. Returns the path whose old controller was reset, if it was.
    pub(super) fn handle_completion(
        &mut self,
        paths: &mut [Path],
        by: usize,
        completion: &IoCompletion,
    ) -> Option<usize> {
        let pending = Some((by, completion.token));
        let index = self.fences.iter().position(|fence| fence.pending == pending)?;
        let fence = &mut self.fences[index];
        fence.pending = None;
        let is_reset =
            completion.status.is_success() && CrossResetResult(completion.result).is_reset();
        let old_controller = fence.old_controller.filter(|_| is_reset)?;
        paths[index].connected_controller()?.confirm_fenced(old_controller).then_some(index)
    }
}

/// Sends the command, if the controller supports it and has a free entry.
fn send_reset(
    now: Instant,
    path: &mut Path,
    token: u64,
    old_controller: CrossControllerReset,
) -> bool {
    let Some(remote) = path.connected_controller() else { return false };
    let controller = remote.controller();
    let is_supported = controller.identity().is_some_and(|identity| identity.page.ccrl() > 0);
    is_supported && controller.submit_admin(now, token, old_controller.to_command(), None).is_ok()
}
