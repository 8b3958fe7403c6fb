//! NBD exports of the live configuration, and their replacement by those of a new one.
//!
//! A device that a namespace has too is opened once, with one claim: both write through the same block
//! device, which keeps late writes of a disconnected client or host from landing on newer ones.

use std::sync::Arc;

use tenmil_base::{Error, Span};
use tenmil_block::Bdev;
use tenmil_linux::socket_stream::StreamListener;
use tenmil_reactor::Registry;
use tenmil_rpc::NbdExports;
use tenmil_rpc::target_config::{
    ExportConfig, HostsConfig, NamespaceConfig, NbdConfig, NbdListener, TargetConfig,
};
use tenmil_serve::nbd::{ExportEvent, ExportedDevice, NbdTls, Server, ServerConfig};

use super::{AppliedChanges, ApplyError, LiveConfig, LiveNamespace, LiveSubsystem, TargetContext};
use crate::commands::serve::nbd::{CLIENTS_MAX, load_tls};
use crate::commands::serve::open_listener;

/// Exports that are served, and their server.
#[derive(Default)]
pub(in crate::commands::serve::nvme_tcp) struct LiveExports {
    /// `None` until there is an export.
    server: Option<Server>,
    listeners: Vec<LiveNbdListener>,
    exports: Vec<LiveExport>,
}

/// What exports need of the process.
pub(in crate::commands::serve::nvme_tcp) struct ExportContext {
    pub(in crate::commands::serve::nvme_tcp) reactors: Arc<Registry>,
    /// Exports that RPC clients can query and change.
    pub(in crate::commands::serve::nvme_tcp) published: NbdExports,
}

#[derive(Clone)]
struct LiveNbdListener {
    requested: NbdListener,
    /// Bound address, with the port that was picked if port 0 was configured.
    bound: NbdListener,
    number: u16,
}

/// Export that is served.
#[derive(Clone)]
pub(super) struct LiveExport {
    requested: ExportConfig,
    /// The open device, as that of a namespace.
    opened: LiveNamespace,
    served: Arc<ExportedDevice>,
}

/// New objects of a configuration, not yet visible to clients.
pub(super) struct PreparedExports {
    server: Option<Server>,
    listeners: Vec<LiveNbdListener>,
    listen_sockets: Vec<(StreamListener, LiveNbdListener)>,
    exports: Vec<LiveExport>,
    tls: Option<NbdTls>,
}

impl LiveExports {
    /// Bound listeners.
    pub(in crate::commands::serve::nvme_tcp) fn listeners(
        &self,
    ) -> impl Iterator<Item = &NbdListener> {
        self.listeners.iter().map(|listener| &listener.bound)
    }

    /// Exports, each with the bound listeners that offer it.
    pub(in crate::commands::serve::nvme_tcp) fn exports(
        &self,
    ) -> impl Iterator<Item = (&ExportedDevice, Vec<&NbdListener>)> {
        self.exports.iter().map(|export| {
            let offers =
                |one: &&LiveNbdListener| export.requested.listeners.contains(&one.requested);
            let bound = self.listeners.iter().filter(offers).map(|one| &one.bound);
            (&*export.served, bound.collect())
        })
    }

    /// The open device of an export with this URI.
    pub(super) fn find_open(&self, uri: &tenmil_block::uri::Uri) -> Option<&LiveNamespace> {
        let found = self.exports.iter().find(|export| export.requested.uri == *uri);
        found.map(|export| &export.opened)
    }

    /// Open devices of all exports.
    pub(in crate::commands::serve::nvme_tcp) fn devices(
        &self,
    ) -> impl Iterator<Item = &LiveNamespace> {
        self.exports.iter().map(|export| &export.opened)
    }

    /// Removes the exports whose device is open for reading only and that `requested` has for writing. Returns
    /// their devices.
    pub(super) fn release_read_only(&mut self, requested: &TargetConfig) -> Vec<Bdev> {
        let is_it = |export: &LiveExport| {
            let becomes_writable =
                |one: &ExportConfig| one.uri == export.requested.uri && !one.is_read_only;
            export.opened.descriptor.claim().is_read_only()
                && requested.exports.iter().any(becomes_writable)
        };
        let (gone, stays): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.exports).into_iter().partition(is_it);
        self.exports = stays;
        if let Some(server) = &mut self.server {
            gone.iter().for_each(|export| _ = server.remove_export(&export.requested.name));
        }
        gone.into_iter().map(|export| export.opened.device).collect()
    }

    /// Next event of an export.
    pub(in crate::commands::serve::nvme_tcp) fn next_event(&self) -> Option<ExportEvent> {
        self.server.as_ref()?.next_export_event()
    }

    /// Opens the devices and sockets of the exports of a configuration; those that stay are reused.
    /// `subsystems` are those of the configuration, whose devices may be exported too.
    pub(super) fn prepare(
        &self,
        live: &LiveConfig,
        requested: &TargetConfig,
        subsystems: &[LiveSubsystem],
    ) -> Result<PreparedExports, ApplyError> {
        let refuse_nbd = |refused| ApplyError { refused, line: requested.nbd.line, key: "nbd" };
        let before = live.configuration.as_ref();
        if let Some(before) =
            before.filter(|before| self.server.is_some() && before.nbd != requested.nbd)
        {
            let text = if before.nbd.has_tls() == requested.nbd.has_tls() {
                "it is another one, expected that of the start"
            } else {
                "TLS is switched, expected it as at start"
            };
            let hint = "[nbd] is taken once: start the process again for another";
            return Err(refuse_nbd(Error::usage(text).with_hint(hint)));
        }
        let mut tls = load_tls(&requested.nbd).map_err(refuse_nbd)?;
        let (listeners, listen_sockets) = self.prepare_listeners(requested)?;
        let exports = requested.exports.iter();
        let exports: Vec<LiveExport> = exports
            .map(|export| self.prepare_export(live, export, subsystems))
            .collect::<Result<_, _>>()?;
        let server = match (&self.server, exports.is_empty()) {
            (None, false) => {
                let server = start_server(&live.context, &requested.nbd, tls.take());
                Some(server.map_err(refuse_nbd)?)
            }
            _ => None,
        };
        Ok(PreparedExports { server, listeners, listen_sockets, exports, tls })
    }

    #[expect(clippy::type_complexity, reason = "the two belong together in one place only")]
    fn prepare_listeners(
        &self,
        requested: &TargetConfig,
    ) -> Result<(Vec<LiveNbdListener>, Vec<(StreamListener, LiveNbdListener)>), ApplyError> {
        let (mut listeners, mut sockets) = (Vec::<LiveNbdListener>::new(), Vec::new());
        for export in &requested.exports {
            for one in &export.listeners {
                if listeners.iter().any(|listener| listener.requested == *one) {
                    continue;
                }
                if let Some(same) = self.listeners.iter().find(|it| it.requested == *one) {
                    listeners.push(same.clone());
                    continue;
                }
                let refuse = |refused| ApplyError { refused, line: export.line, key: "listen" };
                let socket = open_listener(&one.address).map_err(refuse)?;
                let bound = NbdListener { address: socket.address().clone(), ..one.clone() };
                let is_used =
                    |number| self.listeners.iter().chain(&listeners).any(|it| it.number == number);
                let number = (0..u16::MAX).find(|number| !is_used(*number)).unwrap_or(u16::MAX);
                let listener = LiveNbdListener { requested: one.clone(), bound, number };
                listeners.push(listener.clone());
                sockets.push((socket, listener));
            }
        }
        Ok((listeners, sockets))
    }

    fn prepare_export(
        &self,
        live: &LiveConfig,
        requested: &ExportConfig,
        subsystems: &[LiveSubsystem],
    ) -> Result<LiveExport, ApplyError> {
        let is_same = |before: &&LiveExport| {
            let (now, then) = (requested, &before.requested);
            (&now.name, &now.uri, now.is_read_only, now.allows_resize)
                == (&then.name, &then.uri, then.is_read_only, then.allows_resize)
        };
        if let Some(before) = self.exports.iter().find(is_same) {
            return Ok(LiveExport { requested: requested.clone(), ..before.clone() });
        }
        let refuse = |why: Error| ApplyError {
            refused: Error::new(why.category(), format!("serve {:#}: {why}", requested.uri)),
            line: requested.line,
            key: "uri",
        };
        let all = live.subsystems.iter().chain(subsystems);
        let mut namespaces = all.flat_map(|stood| &stood.namespaces);
        let shared = namespaces.find(|served| served.requested.uri == requested.uri);
        if let Some(shared) =
            shared.filter(|it| it.requested.is_read_only && !requested.is_read_only)
        {
            let text = format!(
                "namespace {} has the device read-only, expected `read-only = true` here, too",
                shared.requested.nsid
            );
            return Err(refuse(Error::usage(text)));
        }
        let (opened, is_shared) = match shared.or_else(|| self.find_open(&requested.uri)) {
            Some(open) => (open.clone(), true),
            None => {
                let namespace = NamespaceConfig {
                    nsid: 0,
                    uri: requested.uri.clone(),
                    line: requested.line,
                    is_read_only: requested.is_read_only,
                    hosts: HostsConfig::Any,
                    ana_group: 1,
                    slow_io: None,
                };
                (live.open_device(&namespace, "nbd")?, false)
            }
        };
        let descriptor = opened.descriptor.open_with_same_claim().map_err(refuse)?;
        let config = tenmil_serve::nbd::ExportConfig {
            name: requested.name.clone(),
            description: opened.description.clone(),
            uri: requested.uri.to_string(),
            device: &opened.device,
            limits: requested.limits,
            is_read_only: requested.is_read_only,
            allows_resize: requested.allows_resize,
            regions: &live.context.regions,
        };
        let served = ExportedDevice::from_descriptor(config, descriptor).map_err(refuse)?;
        let served = if is_shared { served.with_own_counters() } else { served };
        Ok(LiveExport { requested: requested.clone(), opened, served: Arc::new(served) })
    }

    /// Reads the certificate and the keys again.
    pub(super) fn reload_tls(&self, nbd: &NbdConfig) -> Result<(), Error> {
        match (&self.server, load_tls(nbd)?) {
            (Some(server), Some(tls)) => server.replace_tls(&tls),
            _ => Ok(()),
        }
    }

    /// Publishes the prepared objects and removes the old ones. `slow_io` is the time from which requests are
    /// logged, and whether it has changed.
    pub(super) fn commit(
        &mut self,
        prepared: PreparedExports,
        (slow_io, is_other_time): (Option<Span>, bool),
        context: &TargetContext,
        changes: &mut AppliedChanges,
    ) {
        let PreparedExports { server, listeners, listen_sockets, exports, tls } = prepared;
        self.server = self.server.take().or(server);
        let Some(server) = &mut self.server else { return };
        if let Some(tls) = tls
            && let Err(why) = server.replace_tls(&tls)
        {
            changes.add_failure(format!("NBD keeps its former certificate and keys: {why}"));
        }
        let gone =
            self.listeners.iter().filter(|it| listeners.iter().all(|now| now.number != it.number));
        for gone in gone {
            server.close_listener(gone.number);
            changes.add_change(format!("listens no more at {}", gone.bound));
        }
        let stays =
            |old: &LiveExport| exports.iter().any(|now| Arc::ptr_eq(&now.served, &old.served));
        for gone in self.exports.iter().filter(|old| !stays(old)) {
            server.remove_export(gone.served.export().name());
            changes.add_change(format!("exports {} no more", gone.requested.name));
        }
        let numbers = |export: &LiveExport| {
            let offers =
                |one: &&LiveNbdListener| export.requested.listeners.contains(&one.requested);
            listeners.iter().filter(offers).map(|one| one.number).collect::<Vec<u16>>()
        };
        for export in &exports {
            let before = self.exports.iter().find(|old| Arc::ptr_eq(&old.served, &export.served));
            match before {
                Some(before) => {
                    server.exports().set_listeners(&export.requested.name, numbers(export));
                    if before.requested.listeners != export.requested.listeners {
                        changes
                            .add_change(format!("changes listeners of {}", export.requested.name));
                    }
                    if before.requested.limits != export.requested.limits {
                        let (now, limits) = (context.clock.now(), export.requested.limits);
                        export.served.set_qos_limits(now, limits);
                        changes.add_change(format!(
                            "changes rate limits of {}",
                            export.requested.name
                        ));
                    }
                }
                None => match server.add_export(Arc::clone(&export.served), numbers(export)) {
                    Ok(()) => changes.add_change(format!(
                        "exports {}: {:#}",
                        export.requested.name, export.requested.uri
                    )),
                    Err(why) => changes
                        .add_failure(format!("cannot export {}: {why}", export.requested.name)),
                },
            }
        }
        let new = |export: &LiveExport| {
            !self.exports.iter().any(|old| Arc::ptr_eq(&old.served, &export.served))
        };
        // Clients may have set another time for one that stays.
        for export in exports.iter().filter(|export| is_other_time || new(export)) {
            export.served.slow_io().set_threshold(slow_io);
        }
        for (socket, listener) in listen_sockets {
            let LiveNbdListener { bound, number, .. } = listener;
            match server.open_listener(socket, number, bound.requires_tls) {
                Ok(()) => changes.add_change(format!("listens at {bound}")),
                Err(error) => changes.add_failure(format!("cannot listen at {bound}: {error}")),
            }
        }
        context.nbd.published.replace(exports.iter().map(|one| Arc::clone(&one.served)).collect());
        (self.listeners, self.exports) = (listeners, exports);
    }

    /// Stops accepting clients. The result keeps the devices alive.
    pub(super) fn close_listeners(self) -> impl Send {
        drop(self.server);
        self.exports
    }
}

fn start_server(
    context: &TargetContext,
    nbd: &NbdConfig,
    tls: Option<NbdTls>,
) -> Result<Server, Error> {
    let connections_max = nbd.connections.unwrap_or(CLIENTS_MAX) as usize;
    let server = Server::start(ServerConfig {
        listen_sockets: Vec::new(),
        exports: Vec::new(),
        regions: context.regions.clone(),
        reactors: Arc::clone(&context.nbd.reactors),
        clock: context.clock,
        connections_max,
        per_address_max: nbd.connections_per_address.map_or_else(
            || ServerConfig::default_per_address_max(connections_max),
            |most| most as usize,
        ),
        idle_max: nbd.idle_timeout,
        tls,
    });
    server.map_err(|error| Error::environment(format!("serve over NBD: {error}")))
}
