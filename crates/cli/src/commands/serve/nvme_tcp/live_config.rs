//! Live configuration of the NVMe/TCP target, and its replacement by a new one.
//!
//! ```text
//!    new configuration ─ prepare ─▶ sockets, devices, subsystems ─ commit ─▶ live configuration
//!                           │  may fail: all new objects are closed, nothing has changed;
//!               │  files are made and grown behind the last refusal
//! ```
//!
//! Objects that are equal in both configurations are kept: their connections are not affected.

mod change_requests;
mod closing_devices;
mod disk_identity;
mod gateway_group;
mod live_exports;
mod live_subsystem;
mod reopened_devices;
mod security;
mod shared_devices;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Weak};

use tenmil_base::{BlockDevice, Error};
use tenmil_block::{Bdev, BdevDescriptor, BdevOptions, Claim, DeviceControl, Opener};
use tenmil_dma::RegionTable;
use tenmil_linux::Clock;
use tenmil_linux::socket::{ListenAddress, StreamListener};
use tenmil_nvme_controller::namespace::RevocableCacheInstance;
use tenmil_rpc::target_config::{self, IgnoredLineNumber, TargetConfig};
use tenmil_rpc::{
    DeviceControls, GroupStoreUri, ServedConfiguration, ServedNamespace, TargetConfiguration,
};
use tenmil_serve::tcp::{
    PortSecurity, Server, Service, ServiceLimits, StateDirectory, SubsystemSecurity,
};
use tenmil_wire::cache_instance::CacheInstance;

use self::closing_devices::ClosingDevices;
pub(super) use self::gateway_group::GroupMembership;
use self::gateway_group::LiveGroup;
use self::live_exports::PreparedExports;
pub(super) use self::live_exports::{ExportContext, LiveExports};
use self::live_subsystem::new_subsystem;
pub(super) use self::live_subsystem::{LiveNamespace, LiveSubsystem};
use self::shared_devices::SharedDevices;
use crate::commands::serve::open_listener;

/// The configuration that is served now, with its listeners, subsystems and devices.
pub(super) struct LiveConfig {
    context: TargetContext,
    /// `None` before the first configuration is applied.
    configuration: Option<TargetConfig>,
    /// Text of the configuration: that of the file when it was read or written last.
    text: String,
    listeners: Vec<LiveListener>,
    subsystems: Vec<LiveSubsystem>,
    discovery: SubsystemSecurity,
    exports: LiveExports,
    closing: ClosingDevices,
    shared: SharedDevices,
    /// The gateway group, if the target is in one.
    group: Option<LiveGroup>,
}

/// Services that the live configuration uses.
pub(super) struct TargetContext {
    pub(super) service: Service,
    pub(super) server: Server,
    pub(super) regions: RegionTable,
    pub(super) clock: Clock,
    /// State directory of persistent reservations, if there is one.
    pub(super) state: Option<StateDirectory>,
    /// Devices that RPC clients can query and change.
    pub(super) devices: DeviceControls,
    /// Configuration that RPC clients can query and change.
    pub(super) published: TargetConfiguration,
    /// File that has the configuration, which can be read again and is written by changes.
    pub(super) file: Option<PathBuf>,
    /// What NBD exports need.
    pub(super) nbd: ExportContext,
    /// Membership in a gateway group.
    pub(super) group: Option<GroupMembership>,
}

/// Configuration, and the text that it was parsed from.
pub(in crate::commands::serve) struct ConfigWithText {
    pub(in crate::commands::serve) config: TargetConfig,
    pub(in crate::commands::serve) text: String,
}

impl From<TargetConfig> for ConfigWithText {
    /// A configuration that does not come from a file.
    fn from(config: TargetConfig) -> Self {
        let text = config.to_text();
        Self { config, text }
    }
}

/// Line of an error that stems from no line of the configuration.
const UNKNOWN_LINE: IgnoredLineNumber = IgnoredLineNumber(0);

/// Where a new configuration comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ChangeSource {
    /// This gateway: its group has to agree.
    Local,
    /// The gateway group.
    Group,
}

/// Listen address of the target.
#[derive(Clone, Copy)]
struct LiveListener {
    requested: SocketAddr,
    /// Bound address, with the port that was picked if port 0 was configured.
    address: SocketAddr,
    /// NVMe-oF port number (PORTID) of the service.
    number: u16,
}

/// Error of a configuration that cannot be applied, with the line and key it stems from.
#[derive(Debug)]
pub(super) struct ApplyError {
    pub(super) refused: Error,
    pub(super) line: IgnoredLineNumber,
    pub(super) key: &'static str,
}

/// Result of applying a configuration.
#[derive(Debug, Default)]
pub(super) struct AppliedChanges {
    /// Changes that were made, one line each.
    pub(super) done: Vec<String>,
    /// Changes that failed, one line each.
    pub(super) failed: Vec<String>,
}

/// New objects of a configuration, not yet visible to hosts.
struct PreparedConfig {
    listeners: Vec<LiveListener>,
    listen_sockets: Vec<(StreamListener, LiveListener)>,
    subsystems: Vec<LiveSubsystem>,
    discovery: SubsystemSecurity,
    exports: PreparedExports,
}

impl LiveConfig {
    /// Creates an empty configuration.
    pub(super) fn new(context: TargetContext) -> Self {
        let (listeners, subsystems) = (Vec::new(), Vec::new());
        let (closing, shared) = (ClosingDevices::default(), SharedDevices::default());
        let discovery = SubsystemSecurity::default();
        let (configuration, text, exports) = (None, String::new(), LiveExports::default());
        let group = context.group.clone().map(LiveGroup::new);
        if let Some(group) = &group {
            group.publish_to(&context.service);
        }
        Self {
            context,
            configuration,
            text,
            listeners,
            subsystems,
            discovery,
            exports,
            closing,
            shared,
            group,
        }
    }

    /// Bound listen addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = SocketAddr> {
        self.listeners.iter().map(|listener| listener.address)
    }

    /// Bound addresses of the listeners of a subsystem, and which connections they accept.
    pub(super) fn addresses_of(
        &self,
        stood: &LiveSubsystem,
    ) -> impl Iterator<Item = (SocketAddr, PortSecurity)> {
        let security = |at: usize| Some(self.configuration.as_ref()?.listeners.get(at)?.security);
        let address = move |at: &usize| {
            Some((self.listeners.get(*at)?.address, security(*at).unwrap_or_default()))
        };
        stood.requested.listeners.iter().filter_map(address)
    }

    /// State directory of the configuration.
    pub(super) fn state_directory(&self) -> Option<&Path> {
        self.configuration.as_ref()?.state.as_deref()
    }

    /// Store of the gateway group of the configuration.
    pub(super) fn group_store(&self) -> Option<&GroupStoreUri> {
        Some(&self.configuration.as_ref()?.group.as_ref()?.store)
    }

    /// NBD exports.
    pub(super) const fn exports(&self) -> &LiveExports {
        &self.exports
    }

    /// Files of the certificate and the keys of NBD.
    pub(super) fn nbd_files(&self) -> Vec<&Path> {
        self.configuration.iter().flat_map(|config| config.nbd.files()).collect()
    }

    pub(super) fn subsystems(&self) -> &[LiveSubsystem] {
        &self.subsystems
    }

    /// Directory of the keys that the configuration and its devices may name, if there is one.
    pub(super) fn keyring_directory(&self) -> Option<PathBuf> {
        let named = self.configuration.as_ref().and_then(|config| config.keyring.clone());
        named.or_else(|| tenmil_keyring::default_path().ok()).filter(|path| path.is_dir())
    }

    /// Whether NBD clients may use TLS.
    pub(super) fn has_nbd_tls(&self) -> bool {
        self.configuration.as_ref().is_some_and(|config| config.nbd.has_tls())
    }

    /// Reads the certificate and the keys of NBD again. An error leaves the former ones.
    pub(super) fn reload_nbd_tls(&self) -> Result<(), Error> {
        let Some(config) = &self.configuration else { return Ok(()) };
        self.exports.reload_tls(&config.nbd)
    }

    /// Applies a new configuration and returns the changes. An error leaves everything as it was.
    pub(super) fn apply_config(
        &mut self,
        requested: ConfigWithText,
    ) -> Result<AppliedChanges, ApplyError> {
        self.apply_and_save(requested, ChangeSource::Local, || Ok(None))
    }

    /// Applies a new configuration, and saves it when nothing can be refused any more: after `save` the
    /// file has what is served. `save` may return a warning.
    fn apply_and_save(
        &mut self,
        requested: ConfigWithText,
        source: ChangeSource,
        save: impl FnOnce() -> Result<Option<String>, Error>,
    ) -> Result<AppliedChanges, ApplyError> {
        let ConfigWithText { config: requested, text } = requested;
        // Devices of the configuration have the keys of its keyring.
        security::set_keyring_of_devices(Some(&requested));
        let has_released = self.release_read_only_devices(&requested);
        let prepared = tenmil_linux::storage_file::create_files_if_ok(|| {
            let prepared = self.prepare(&requested)?;
            let refuse = |refused| ApplyError { refused, line: UNKNOWN_LINE, key: "" };
            self.agree_with_group(&text, source).map_err(refuse)?;
            Ok::<_, ApplyError>((prepared, save().map_err(refuse)?))
        });
        let (prepared, warning) = match prepared {
            Ok(prepared) => prepared,
            Err(unfit) => {
                security::set_keyring_of_devices(self.configuration.as_ref());
                if has_released {
                    self.restore_released_devices();
                }
                return Err(unfit);
            }
        };
        self.text = text;
        let mut changes = self.commit(requested, prepared);
        changes.failed.extend(warning);
        for (device, why) in tenmil_devices::tcp::reload_keys() {
            changes.add_failure(format!("{device} keeps its former keys: {why}"));
        }
        Ok(changes)
    }

    fn prepare(&self, requested: &TargetConfig) -> Result<PreparedConfig, ApplyError> {
        if let Some(before) = &self.configuration {
            check_fixed_settings(before, requested)?;
        }
        let security::ReadSecurity { subsystems: securities, discovery } =
            security::read_security(requested)?;
        // Sockets are bound first: they fail more often than devices, and cost less to open.
        let (listeners, listen_sockets) = self.prepare_listeners(requested)?;
        let subsystems = requested.subsystems.iter().zip(securities);
        let subsystems =
            subsystems.map(|(subsystem, security)| self.prepare_subsystem(subsystem, security));
        let subsystems = subsystems.collect::<Result<Vec<_>, _>>()?;
        let exports = self.exports.prepare(self, requested, &subsystems)?;
        Ok(PreparedConfig { listeners, listen_sockets, subsystems, discovery, exports })
    }

    #[expect(clippy::type_complexity, reason = "the two belong together in one place only")]
    fn prepare_listeners(
        &self,
        requested: &TargetConfig,
    ) -> Result<(Vec<LiveListener>, Vec<(StreamListener, LiveListener)>), ApplyError> {
        let (mut listeners, mut listen_sockets) = (Vec::<LiveListener>::new(), Vec::new());
        for one in &requested.listeners {
            // Several listeners may ask for port 0 of one address.
            let is_taken = |number| listeners.iter().any(|taken| taken.number == number);
            let before = self.listeners.iter();
            let mut before =
                before.filter(|it| it.requested == one.address && !is_taken(it.number));
            if let Some(same) = before.next() {
                listeners.push(*same);
                continue;
            }
            let refuse = |refused| ApplyError { refused, line: one.line, key: "address" };
            let listen_socket = open_listener(&ListenAddress::Tcp(one.address)).map_err(refuse)?;
            let ListenAddress::Tcp(address) = *listen_socket.address() else { continue };
            let used =
                |number| is_taken(number) || self.listeners.iter().any(|it| it.number == number);
            let number = (1..u16::MAX).find(|number| !used(*number)).unwrap_or(u16::MAX);
            let listener = LiveListener { requested: one.address, address, number };
            listeners.push(listener);
            listen_sockets.push((listen_socket, listener));
        }
        Ok((listeners, listen_sockets))
    }

    /// Prepares a subsystem; devices that are open already are reused.
    fn prepare_subsystem(
        &self,
        requested: &target_config::SubsystemConfig,
        security: SubsystemSecurity,
    ) -> Result<LiveSubsystem, ApplyError> {
        let before = self.current_subsystem(&requested.nqn);
        let subsystem = match before.filter(|before| before.has_same_fixed_properties(requested)) {
            Some(before) => before.subsystem.clone(),
            None => new_subsystem(requested, self.group.is_some())?,
        };
        let mut namespaces: Vec<LiveNamespace> = Vec::new();
        for namespace in &requested.namespaces {
            let open = before.and_then(|before| before.find_open_namespace(namespace));
            // An export may have the device already, with a claim that is enough.
            let exported = self.exports.find_open(&namespace.uri);
            let exported =
                exported.filter(|it| namespace.is_read_only || !it.requested.is_read_only);
            let served = match open.or(exported) {
                Some(open) => LiveNamespace { requested: namespace.clone(), ..open.clone() },
                None => match self.open_or_await_device(namespace)? {
                    Some(served) => served,
                    // It is added when another gateway of the group, or this one, has opened it.
                    None => continue,
                },
            };
            let state = self.context.state.as_ref();
            // A continuing namespace has its reservation keeper already; a new one is checked with its
            // own.
            let fresh = open.is_none_or(|open| !served.is_same_namespace(open));
            let config = served.namespace_config(
                state.filter(|_| fresh).map(|state| (state, requested.nqn.as_str())),
            );
            subsystem.check_namespace(&config).map_err(|why| {
                let text = format!("serve {}: {why}", namespace.uri);
                ApplyError { refused: Error::usage(text), line: namespace.line, key: "uri" }
            })?;
            namespaces.push(served);
        }
        let ana_states = self.group.as_ref().map(LiveGroup::ana_states).unwrap_or_default();
        Ok(LiveSubsystem {
            requested: requested.clone(),
            subsystem,
            security,
            namespaces,
            ana_states,
        })
    }

    fn current_subsystem(&self, nqn: &str) -> Option<&LiveSubsystem> {
        self.subsystems.iter().find(|stood| stood.requested.nqn == nqn)
    }

    /// Calls a function with what opens devices.
    fn with_opener<T>(&self, call: impl FnOnce(&Opener<'_>) -> T) -> T {
        let TargetContext { regions, clock, .. } = &self.context;
        let kinds = [tenmil::KINDS, &[(target_config::SCHEME, &self.shared)]].concat();
        call(&Opener { regions, clock: *clock, seed: 1, kinds: &kinds })
    }

    /// Opens the device of a namespace or of an export, and claims it for `holder`.
    fn open_device(
        &self,
        requested: &target_config::NamespaceConfig,
        holder: &str,
    ) -> Result<LiveNamespace, ApplyError> {
        let uri = &requested.uri;
        let refuse = |why: Error| ApplyError {
            refused: Error::new(why.category(), format!("serve {uri:#}: {why}")),
            line: requested.line,
            key: "uri",
        };
        let wanted = if requested.is_read_only { uri.clone().read_only() } else { uri.clone() };
        let opened = self.with_opener(|opener| opener.open(&wanted)).map_err(refuse)?;
        let clock = &self.context.clock;
        // Each queue of each host has a channel, which needs no more depth than the queue. The
        // controller measures the time of commands, so the block layer need not.
        let depth = ServiceLimits::default().queue_entries.into();
        let timing = holder != "nvme-tcp";
        let options = BdevOptions { depth, timing, ..BdevOptions::new(*clock, 1) };
        let device = Bdev::new(&uri.to_string(), opened.medium, options).map_err(refuse)?;
        let claim = if requested.is_read_only { Claim::ReadShared } else { Claim::WriteOnce };
        let descriptor = device.open(claim, holder).map_err(|why| ApplyError {
            refused: Error::new(why.category(), format!("serve {uri:#}: {why}")),
            line: requested.line,
            key: "uri",
        })?;
        let (requested, descriptor) = (requested.clone(), Arc::new(descriptor));
        let (description, handles) = (opened.description, opened.handles);
        let identities = opened.identities;
        let cache =
            tenmil_linux::random_id().map(|id| RevocableCacheInstance::new(CacheInstance(id)));
        let served = Arc::clone(&descriptor) as Arc<dyn BlockDevice>;
        Ok(LiveNamespace {
            requested,
            description,
            device,
            descriptor,
            served,
            cache,
            handles,
            identities,
        })
    }

    /// Publishes the prepared objects, removes the old ones and returns the changes.
    fn commit(&mut self, requested: TargetConfig, prepared: PreparedConfig) -> AppliedChanges {
        let PreparedConfig { listeners, listen_sockets, subsystems, discovery, exports } = prepared;
        let mut changes = AppliedChanges::default();
        let is_there = |number| listeners.iter().any(|listener| listener.number == number);
        // Listeners close first, so that no host connects to a subsystem that is about to be removed.
        for gone in self.listeners.iter().filter(|listener| !is_there(listener.number)) {
            self.context.server.close_listener(gone.number);
            self.context.service.remove_port(gone.number);
            changes.add_change(format!("listens no more at {}", gone.address));
        }
        let tightened = self.update_ports(&requested, &listeners, &mut changes);
        if self.discovery != discovery {
            self.context.service.set_discovery_security(discovery.clone());
            if self.configuration.is_some() {
                changes.add_change("changes keys or requirements of discovery".to_owned());
            }
        }
        for gone in &self.subsystems {
            let stays = subsystems.iter().any(|stood| stood.is_same_subsystem(gone));
            if !stays {
                self.context.service.remove_subsystem(&gone.requested.nqn);
                gone.remove_namespaces();
                changes.add_change(format!("offers {} no more", gone.requested.nqn));
            }
        }
        for stood in &subsystems {
            match self.subsystems.iter().find(|before| stood.is_same_subsystem(before)) {
                Some(before) => {
                    stood.end_associations_at(before, &listeners, &tightened, &self.context);
                    stood.replace_in_service(before, &listeners, &self.context, &mut changes)
                }
                None => stood.add_to_service(&listeners, &self.context, &mut changes),
            }
        }
        self.update_slow_io(&requested, &mut changes);
        if self.configuration.as_ref().is_none_or(|before| before.referrals != requested.referrals)
        {
            self.context.service.set_referrals(requested.referrals.clone());
        }
        // New listeners open last, so that a host that connects finds all subsystems.
        for (listen_socket, listener) in listen_sockets {
            match self.context.server.open_listener(listen_socket, listener.number) {
                Ok(()) => changes.add_change(format!("listens at {}", listener.address)),
                Err(error) => {
                    changes.add_failure(format!("cannot listen at {}: {error}", listener.address))
                }
            }
        }
        // Those of exports, too, until they are replaced.
        let exported_before: Vec<LiveNamespace> = self.exports.devices().cloned().collect();
        let before = self.configuration.as_ref().map(|before| before.slow_io);
        let slow_io = (requested.slow_io, before != Some(requested.slow_io));
        self.exports.commit(exports, slow_io, &self.context, &mut changes);
        self.publish_controls(&subsystems);
        let of_exports = || self.exports.devices();
        // Devices that no namespace uses any more are closed later, off the reactors.
        let before = self.subsystems.iter().flat_map(|stood| &stood.namespaces);
        let mut gone: Vec<Arc<BdevDescriptor>> = Vec::new();
        for one in before.chain(&exported_before) {
            let now = subsystems.iter().flat_map(|stood| &stood.namespaces);
            let mut used = now.chain(of_exports()).map(|served| &served.descriptor).chain(&gone);
            if !used.any(|descriptor| Arc::ptr_eq(descriptor, &one.descriptor)) {
                self.closing.add_device(one.device.clone());
                gone.push(Arc::clone(&one.descriptor));
            }
        }
        drop((gone, exported_before));
        (self.configuration, self.listeners, self.subsystems) =
            (Some(requested), listeners, subsystems);
        self.discovery = discovery;
        self.publish();
        changes
    }

    /// Publishes the controls of the devices of these subsystems and of the exports for RPC clients.
    fn publish_controls(&self, subsystems: &[LiveSubsystem]) {
        let namespaces = subsystems.iter().flat_map(|stood| &stood.namespaces);
        let mut hands: Vec<DeviceControl> = Vec::new();
        for hand in namespaces.chain(self.exports.devices()).flat_map(|one| &one.handles) {
            // Several namespaces may share one device.
            if !hands.iter().any(|known| known.is_same(hand)) {
                hands.push(hand.clone());
            }
        }
        self.context.devices.replace_controls(hands);
    }

    /// Publishes the configuration for RPC clients.
    fn publish(&self) {
        let Some(config) = self.configuration.clone() else { return };
        let of = |stood: &LiveSubsystem, served: &LiveNamespace| ServedNamespace {
            nqn: stood.requested.nqn.clone(),
            nsid: served.requested.nsid,
            device: Arc::downgrade(&served.descriptor) as Weak<dyn BlockDevice>,
        };
        let namespaces = self
            .subsystems
            .iter()
            .flat_map(|stood| stood.namespaces.iter().map(move |served| of(stood, served)));
        self.context.published.publish(ServedConfiguration {
            config,
            text: self.text.clone(),
            file: self.context.file.clone(),
            addresses: self.addresses().collect(),
            namespaces: namespaces.collect(),
        });
    }

    /// Adds new ports and changes those whose TLS or networks are others. Returns the numbers of ports
    /// that require TLS from now on and did not before.
    fn update_ports(
        &self,
        requested: &TargetConfig,
        listeners: &[LiveListener],
        changes: &mut AppliedChanges,
    ) -> Vec<u16> {
        let mut tightened = Vec::new();
        for (config, listener) in requested.listeners.iter().zip(listeners) {
            let before = self.listeners.iter().position(|it| it.number == listener.number);
            let before = before.and_then(|at| self.configuration.as_ref()?.listeners.get(at));
            let same = |before: &target_config::ListenerConfig| {
                (before.security, &before.networks) == (config.security, &config.networks)
            };
            if before.is_some_and(same) {
                continue;
            }
            self.context.service.add_port(listener.number, security::port(*listener, config));
            if let Some(before) = before {
                let tls = security::tls_name(config.security);
                changes.add_change(format!("changes {}: tls {tls}", listener.address));
                tightened.extend(security::is_tightened(before, config).then_some(listener.number));
            }
        }
        tightened
    }

    /// Changes the thresholds for slow commands of new subsystems, and of those whose thresholds are others.
    fn update_slow_io(&self, requested: &TargetConfig, changes: &mut AppliedChanges) {
        for subsystem in &requested.subsystems {
            let thresholds = subsystem.slow_io_thresholds(requested.slow_io);
            let before = self.configuration.as_ref().and_then(|before| {
                let same = before.subsystems.iter().find(|before| before.nqn == subsystem.nqn)?;
                Some(same.slow_io_thresholds(before.slow_io))
            });
            if before.as_ref() == Some(&thresholds) {
                continue;
            }
            self.context.service.set_slow_io(&subsystem.nqn, thresholds);
            if before.is_some() {
                changes.add_change(format!("changes the slow-io times of {}", subsystem.nqn));
            }
        }
    }

    /// Closes the listeners. The returned value keeps the subsystems and devices alive.
    pub(super) fn close_listeners(self) -> impl Send {
        let Self { context, subsystems, closing, exports, .. } = self;
        let TargetContext { service, server, regions, state, .. } = context;
        drop(server);
        let exports = exports.close_listeners();
        // Dropped in this order; the state directory is last because it completes pending writes.
        (subsystems, exports, closing, service, regions, state)
    }

    /// Handles device events, and closes removed devices that are no longer in use.
    pub(super) fn handle_device_events(&mut self) {
        self.closing.close_unused();
        for stood in &self.subsystems {
            for served in &stood.namespaces {
                let is_removed = served.handle_device_event(&stood.subsystem);
                match (is_removed, self.group.is_some()) {
                    (false, _) => {}
                    (true, true) => self.give_up_ana_group(served),
                    (true, false) => {
                        stood.subsystem.remove_namespace(served.requested.nsid);
                    }
                }
            }
        }
    }
}

impl AppliedChanges {
    fn add_change(&mut self, text: String) {
        self.done.push(text);
    }

    fn add_failure(&mut self, text: String) {
        self.failed.push(text);
    }

    /// Turns failed changes into an error: at start, all of the configuration has to be served.
    pub(super) fn into_result(self) -> Result<(), Error> {
        match self.failed.is_empty() {
            true => Ok(()),
            false => Err(Error::environment(format!("serve: {}", self.failed.join("; ")))),
        }
    }
}

impl ApplyError {
    /// The error with the file, line and key it stems from.
    pub(super) fn in_file(self, path: &Path) -> Error {
        let Self { refused, line: IgnoredLineNumber(line), key } = self;
        let place = match line {
            0 => String::new(),
            line => format!(" line {line}, `{key}`:"),
        };
        let text = format!("{}:{place} {}", path.display(), refused.text);
        Error { text, ..refused }
    }

    /// The error of a text that the client has not written, so that a line would mean nothing to it.
    fn of_edit(self, action: &str) -> Error {
        let Self { refused, key, .. } = self;
        let place = if key.is_empty() { String::new() } else { format!("`{key}`: ") };
        let text = format!("{action}: {place}{}", refused.text);
        Error { text, ..refused }
    }
}

impl From<tenmil_linux::storage_file::FileError> for ApplyError {
    /// It names the file that cannot be made.
    fn from(error: tenmil_linux::storage_file::FileError) -> Self {
        Self { refused: error.into(), line: IgnoredLineNumber::default(), key: "uri" }
    }
}

/// Rejects changes of settings that are fixed at start.
fn check_fixed_settings(before: &TargetConfig, requested: &TargetConfig) -> Result<(), ApplyError> {
    super::connection_limits::check_limits_unchanged(before, requested)?;
    gateway_group::check_group_unchanged(before, requested)?;
    let refuse = |(found, expected): (String, String), line, key, what: &str| {
        let text = format!("it is {found}, expected {expected} as at start");
        let hint = format!("{what} is taken once: start the process again for another");
        Err(ApplyError { refused: Error::usage(text).with_hint(hint), line, key })
    };
    if before.memory_bytes != requested.memory_bytes {
        let shown = |bytes: Option<u64>| {
            bytes.map_or_else(|| "the usual".to_owned(), |bytes| format!("{bytes} bytes"))
        };
        let both = (shown(requested.memory_bytes), shown(before.memory_bytes));
        return refuse(both, requested.memory_line, "buffer-memory", "buffer memory");
    }
    if before.state != requested.state {
        let shown = |path: Option<&Path>| {
            path.map_or_else(|| "none".to_owned(), |path| path.display().to_string())
        };
        let both = (shown(requested.state.as_deref()), shown(before.state.as_deref()));
        return refuse(both, requested.state_line, "state-dir", "the state directory");
    }
    Ok(())
}
