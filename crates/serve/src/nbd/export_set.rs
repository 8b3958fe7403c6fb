//! Exports of a server, and which of them each listener offers.
//!
//! A client selects an export by its name. The empty name selects the only export of a listener; where
//! there are several, it selects none, so that a client never gets another device because the list has
//! changed.

use std::fmt;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tenmil_base::Error;
use tenmil_reactor::ThreadHandle;

use super::export::Export;
use super::exported_device::{ExportedDevice, SessionEntry};
use super::session_handle::{ConnectionSample, SessionCommand, SessionHandle};

/// Exports that can be added and removed while clients are connected. A handle, cheap to clone.
#[derive(Clone, Default)]
pub struct ExportSet(Arc<Shared>);

#[derive(Default)]
struct Shared {
    lists: Mutex<Lists>,
    next_connection: AtomicU64,
}

#[derive(Default)]
struct Lists {
    exports: Vec<OfferedExport>,
    /// Sessions that belong to no export yet.
    negotiating: Vec<SessionEntry>,
}

struct OfferedExport {
    device: Arc<ExportedDevice>,
    /// Numbers of the listeners that offer it.
    listeners: Vec<u16>,
}

impl OfferedExport {
    /// Whether clients of a listener may select it: its device is still there.
    fn is_offered_at(&self, listener: u16) -> bool {
        self.listeners.contains(&listener) && !self.device.is_removed()
    }
}

/// Exports that a client of a connection may select.
#[derive(Clone, Debug)]
pub(super) enum OfferedExports {
    /// This one.
    One(Arc<Export>),
    /// Those of a listener, as they are when they are asked for.
    OfListener(ExportSet, u16),
}

impl ExportSet {
    /// Adds an export, which these listeners offer.
    ///
    /// # Errors
    ///
    /// If an export has that name.
    pub fn add(&self, device: Arc<ExportedDevice>, listeners: Vec<u16>) -> Result<(), Error> {
        let mut lists = self.lists();
        let name = device.export().name();
        if lists.exports.iter().any(|one| one.device.export().name() == name) {
            let text = format!("export `{name}` exists already, expected another name");
            return Err(Error::usage(text));
        }
        lists.exports.push(OfferedExport { device, listeners });
        Ok(())
    }

    /// Changes the listeners that offer an export. Connected clients stay.
    pub fn set_listeners(&self, name: &str, listeners: Vec<u16>) {
        let mut lists = self.lists();
        let found = lists.exports.iter_mut().find(|one| one.device.export().name() == name);
        if let Some(one) = found {
            one.listeners = listeners;
        }
    }

    /// Removes an export, and disconnects its clients after their outstanding requests.
    pub fn remove(&self, name: &str) -> Option<Arc<ExportedDevice>> {
        let mut lists = self.lists();
        let at = lists.exports.iter().position(|one| one.device.export().name() == name)?;
        let device = lists.exports.remove(at).device;
        drop(lists);
        for connection in device.connections() {
            device.disconnect_client(connection.id);
        }
        Some(device)
    }

    /// All exports.
    #[must_use]
    pub fn devices(&self) -> Vec<Arc<ExportedDevice>> {
        self.lists().exports.iter().map(|one| Arc::clone(&one.device)).collect()
    }

    /// Connections whose clients have not selected one of several exports.
    #[must_use]
    pub fn negotiating(&self) -> Vec<ConnectionSample> {
        self.lists().negotiating.iter().map(SessionEntry::sample).collect()
    }

    /// Disconnects all clients after their outstanding requests.
    pub fn disconnect_all(&self) {
        let lists = self.lists();
        lists.negotiating.iter().for_each(|one| one.send_command(SessionCommand::Disconnect));
        for device in lists.exports.iter().map(|one| &one.device) {
            for connection in device.connections() {
                device.disconnect_client(connection.id);
            }
        }
    }

    /// Whether no client is connected.
    #[must_use]
    pub fn has_no_connections(&self) -> bool {
        let lists = self.lists();
        lists.negotiating.is_empty()
            && lists.exports.iter().all(|one| one.device.connections().is_empty())
    }

    /// Allocates a connection id, which is never reused.
    pub(super) fn allocate_connection_id(&self) -> u64 {
        self.0.next_connection.fetch_add(1, Ordering::Relaxed)
    }

    /// Registers the session of a client at a listener: with the only export there, or with none yet.
    pub(super) fn add_session(
        &self,
        session: Arc<SessionHandle>,
        listener: u16,
    ) -> Option<Arc<ExportedDevice>> {
        let mut lists = self.lists();
        let entry = SessionEntry::new(session);
        let mut offered = lists.exports.iter().filter(|one| one.is_offered_at(listener));
        match (offered.next(), offered.next()) {
            (Some(only), None) => {
                only.device.add_session(entry);
                Some(Arc::clone(&only.device))
            }
            _ => {
                lists.negotiating.push(entry);
                None
            }
        }
    }

    /// Sets the handle that wakes a session, which may have selected its export meanwhile.
    pub(super) fn set_session_thread(&self, connection: u64, thread: &ThreadHandle) {
        let mut lists = self.lists();
        let found = lists.negotiating.iter_mut().find(|one| one.id() == connection);
        if let Some(entry) = found {
            entry.set_thread(thread.clone());
            return;
        }
        lists.exports.iter().for_each(|one| one.device.set_session_thread(connection, thread));
    }

    /// Registers a session with the export that its client has selected, and returns its device; none if
    /// the export has been removed.
    pub(super) fn select(
        &self,
        export: &Arc<Export>,
        session: &SessionHandle,
        registered: Option<&Arc<ExportedDevice>>,
    ) -> Option<Arc<ExportedDevice>> {
        let mut lists = self.lists();
        let found = lists.exports.iter().find(|one| Arc::ptr_eq(one.device.export(), export));
        let device = Arc::clone(&found?.device);
        if registered.is_some_and(|registered| Arc::ptr_eq(registered, &device)) {
            return Some(device);
        }
        let entry = match registered {
            Some(registered) => registered.take_session(session.id()),
            None => {
                let all = &mut lists.negotiating;
                all.iter().position(|one| one.id() == session.id()).map(|at| all.remove(at))
            }
        };
        device.add_session(entry?);
        Some(device)
    }

    /// Removes a session that has selected no export.
    pub(super) fn remove_session(&self, connection: u64) {
        self.lists().negotiating.retain(|one| one.id() != connection);
    }

    /// Whether clients of a listener have nothing to select.
    pub(super) fn is_empty_at(&self, listener: u16) -> bool {
        !self.lists().exports.iter().any(|one| one.is_offered_at(listener))
    }

    fn offered_at(&self, listener: u16) -> Vec<Arc<Export>> {
        let lists = self.lists();
        let offered = lists.exports.iter().filter(|one| one.is_offered_at(listener));
        offered.map(|one| Arc::clone(one.device.export())).collect()
    }

    fn lists(&self) -> MutexGuard<'_, Lists> {
        self.0.lists.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl OfferedExports {
    /// The exports that are offered now.
    pub(super) fn list(&self) -> Vec<Arc<Export>> {
        match self {
            Self::One(export) => vec![Arc::clone(export)],
            Self::OfListener(set, listener) => set.offered_at(*listener),
        }
    }
}

/// The export of that name; the empty name is that of the only one.
pub(super) fn find_export<'a>(exports: &'a [Arc<Export>], name: &str) -> Option<&'a Arc<Export>> {
    match exports {
        [only] if name.is_empty() => Some(only),
        _ => exports.iter().find(|export| export.name() == name),
    }
}

impl fmt::Debug for ExportSet {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.devices();
        let names = devices.iter().map(|device| device.export().name());
        out.debug_list().entries(names).finish()
    }
}
