//! Reporting of path state changes, as log messages and as state that RPC methods return.

use std::fmt;
use std::sync::LazyLock;

use tenmil_base::Span;
use tenmil_nvme_fabrics::{
    DevicePaths, PathAnaState, PathChange, PathEvent, PathTable, TimeoutPolicy,
};

use super::name::TcpName;

/// Reports path state changes of a device, as log messages and through the RPC interface.
pub(super) struct PathNotifier {
    device: String,
    addresses: Vec<String>,
    paths: DevicePaths,
    policy: TimeoutPolicy,
    /// Whether changes of a single path are logged.
    is_for_operator: bool,
}

/// Paths of all devices of this process, for RPC methods.
static TABLE: LazyLock<PathTable> = LazyLock::new(PathTable::default);

impl PathNotifier {
    pub(super) fn new(name: &TcpName) -> Self {
        let addresses: Vec<String> = name.addresses().map(str::to_owned).collect();
        let device = format!("tcp://{}/{}", addresses.join(","), name.options.subsystem);
        let paths = TABLE.add(device.clone(), addresses.iter().cloned());
        // `discover --watch` reports the state of a discovery service itself.
        let is_for_operator = !name.options.is_discovery();
        Self { device, addresses, paths, policy: name.options.policy, is_for_operator }
    }

    pub(super) fn report(&self, event: &PathEvent) {
        if !event.is_for_operator() {
            return;
        }
        if let Some(change) = change_of(event) {
            self.paths.record(change);
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
        self.paths.record(PathChange::Up(0, PathAnaState::Optimized.name()));
    }

    /// Reports that the only path was lost for this reason and is being reconnected.
    pub(super) fn notify_lost(&self, why: &str) {
        self.paths.record(PathChange::Lost(0, why));
        if self.is_for_operator {
            let TimeoutPolicy { retry, fail_fast, give_up, .. } = self.policy;
            self.say(format_args!(
                "connection lost ({why}); reconnecting every {retry} for up to {give_up}, and what waits \
                 for it fails after {fail_fast}"
            ));
        }
    }

    /// Reports that the only path was restored after `disconnect_reason`.
    pub(super) fn notify_restored(&self, disconnect_reason: Span) {
        self.notify_up();
        if self.is_for_operator {
            self.say(format_args!("it is there again, after {}", in_ms(disconnect_reason)));
        }
    }

    /// Reports that the only path was given up for this reason.
    pub(super) fn notify_removed(&self, why: &str) {
        self.paths.record(PathChange::Lost(0, why));
        if self.is_for_operator {
            self.say(format_args!("removed: {why}"));
        }
    }

    /// Reports an event of the controller of the only path.
    pub(super) fn notify_controller_event(&self, event: tenmil_nvme_host::Event) {
        self.report(&PathEvent::Controller { path: 0, event });
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

fn change_of(event: &PathEvent) -> Option<PathChange<'_>> {
    Some(match event {
        PathEvent::Up { path, access } => PathChange::Up(*path, access.name()),
        PathEvent::Down { path, why } => PathChange::Lost(*path, why),
        PathEvent::AnaChanged { path, access } => PathChange::Changed(*path, access.name()),
        PathEvent::NamespaceMismatch { path, why } => PathChange::Mismatch(*path, why),
        PathEvent::Failover { to, .. } => PathChange::Selected(*to),
        PathEvent::AllPathsDown => PathChange::AllPathsDown,
        _ => return None,
    })
}

/// Paths of all devices of this process.
pub fn paths_of_all() -> &'static PathTable {
    &TABLE
}
