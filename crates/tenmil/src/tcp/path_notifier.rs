//! Reporting of path state changes, as log messages and as state that RPC methods return.

use std::fmt;
use std::sync::LazyLock;

use tenmil_base::Span;
use tenmil_nvme_fabrics::{PathAnaState, PathEvent, TimeoutPolicy};
use tenmil_rpc::{DevicePaths, PathStateEvent, Paths};

use super::name::TcpName;

/// Reports path state changes of a device, as log messages and through the RPC interface.
pub(super) struct PathNotifier {
    device: String,
    addresses: Vec<String>,
    board: DevicePaths,
    policy: TimeoutPolicy,
    /// Whether changes of a single path are logged.
    is_for_people: bool,
}

/// Paths of all devices of this process, for RPC methods.
static BOARD: LazyLock<Paths> = LazyLock::new(Paths::default);

impl PathNotifier {
    pub(super) fn new(name: &TcpName) -> Self {
        let addresses: Vec<String> = name.addresses().map(str::to_owned).collect();
        let device = format!("tcp://{}/{}", addresses.join(","), name.options.subsystem);
        let board = BOARD.add(device.clone(), addresses.iter().cloned());
        // `discover --watch` reports the state of a discovery service itself.
        let is_for_people = !name.options.is_discovery();
        Self { device, addresses, board, policy: name.options.policy, is_for_people }
    }

    pub(super) fn tell(&self, event: &PathEvent) {
        if !event.is_for_people() {
            return;
        }
        if let Some(news) = news_of(event) {
            self.board.tell(news);
        }
        let address = path_of(event).and_then(|path| self.addresses.get(path));
        let by = address.map_or_else(String::new, |address| format!(" ({address})"));
        self.say(format_args!("{event}{by}"));
    }

    fn say(&self, what: fmt::Arguments<'_>) {
        tracing::info!(cause = %self.device, "{}: {what}", self.device);
    }

    /// Reports that the only path is up for the first time.
    pub(super) fn notify_up(&self) {
        self.board.tell(PathStateEvent::Up(0, PathAnaState::Optimized.name()));
    }

    /// Reports that the only path was lost for this reason and is being reconnected.
    pub(super) fn notify_lost(&self, why: &str) {
        self.board.tell(PathStateEvent::Lost(0, why));
        if self.is_for_people {
            let TimeoutPolicy { retry, fail_fast, give_up, .. } = self.policy;
            self.say(format_args!(
                "connection lost ({why}); reconnecting every {retry} for up to {give_up}, and what waits \
                 for it fails after {fail_fast}"
            ));
        }
    }

    /// Reports that the only path was restored after `away`.
    pub(super) fn notify_restored(&self, away: Span) {
        self.notify_up();
        if self.is_for_people {
            self.say(format_args!("it is there again, after {}", in_ms(away)));
        }
    }

    /// Reports that the only path was given up for this reason.
    pub(super) fn notify_removed(&self, why: &str) {
        self.board.tell(PathStateEvent::Lost(0, why));
        if self.is_for_people {
            self.say(format_args!("it is gone: {why}"));
        }
    }

    /// Reports an event of the controller of the only path.
    pub(super) fn tell_of_controller(&self, event: tenmil_nvme_host::Event) {
        self.tell(&PathEvent::Controller { path: 0, event });
    }
}

/// Rounds down to whole milliseconds.
fn in_ms(span: Span) -> Span {
    Span::from_ms(span.ns / 1_000_000)
}

fn path_of(event: &PathEvent) -> Option<usize> {
    match event {
        PathEvent::Up { path, .. }
        | PathEvent::Down { path, .. }
        | PathEvent::AnaChanged { path, .. }
        | PathEvent::NamespaceMismatch { path, .. }
        | PathEvent::Controller { path, .. }
        | PathEvent::Failover { to: path, .. } => Some(*path),
        _ => None,
    }
}

fn news_of(event: &PathEvent) -> Option<PathStateEvent<'_>> {
    Some(match event {
        PathEvent::Up { path, access } => PathStateEvent::Up(*path, access.name()),
        PathEvent::Down { path, why } => PathStateEvent::Lost(*path, why),
        PathEvent::AnaChanged { path, access } => PathStateEvent::Changed(*path, access.name()),
        PathEvent::NamespaceMismatch { path, why } => PathStateEvent::Mismatch(*path, why),
        PathEvent::Failover { to, .. } => PathStateEvent::Selected(*to),
        PathEvent::AllPathsDown => PathStateEvent::AllPathsDown,
        _ => return None,
    })
}

/// Paths of all devices of this process.
pub(crate) fn paths_of_all() -> &'static Paths {
    &BOARD
}
