//! Devices and ANA states of a target that is a member of a gateway group.
//!
//! ```text
//!   Configure a change of another gateway is applied
//!   Fence     clients of the former owner are blocklisted, its pools taken over
//!   Open      ANA Change, devices are opened in place of unopened ones
//!   Activate  ANA Optimized
//!   Close     ANA Inaccessible, unopened devices in place of the open ones, which close when they are idle
//! ```
//!
//! A namespace whose geometry is recorded is there also where its device is not open, so that hosts have a path
//! to it before they need it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use tenmil_base::{Error, Limits};
use tenmil_block::uri::Uri;
use tenmil_block::{Bdev, BdevOptions, Claim};
use tenmil_drivers::{LeaseEnd, LeasedDevice, UnopenedDevice, pool};
use tenmil_group::records::{
    NamespaceRecord, controller_ids_of_slot, encode, namespace, namespace_key,
    slot_of_controller_id,
};
use tenmil_group::{Action, GroupPhase, MemberState, MemberStatus, OpenedGroup};
use tenmil_nvme_controller::controller::AnaState;
use tenmil_rbd::fence;
use tenmil_rpc::GroupSession;
use tenmil_rpc::target_config::{GroupConfig, NamespaceConfig, SharedConfig, TargetConfig};
use tenmil_serve::tcp::{GatewayGroupView, Service};

use super::change_requests::save_text;
use super::closing_devices::ClosingDevices;
use super::{AppliedChanges, ApplyError, ChangeSource, ConfigWithText, LiveConfig, LiveNamespace};

/// Membership in a gateway group.
#[derive(Clone)]
pub(in crate::commands::serve::nvme_tcp) struct GroupMembership {
    pub(in crate::commands::serve::nvme_tcp) session: GroupSession,
    pub(in crate::commands::serve::nvme_tcp) lease_end: LeaseEnd,
}

/// Gateway group of the target.
pub(super) struct LiveGroup {
    membership: GroupMembership,
    ana_states: BTreeMap<u32, AnaState>,
    /// ANA groups whose devices wait to be closed.
    closing: Vec<(u32, ClosingDevices)>,
    /// What was known when it was published last.
    status: MemberStatus,
}

impl LiveGroup {
    pub(super) fn new(membership: GroupMembership) -> Self {
        let status = membership.session.status();
        let groups = status.groups.keys();
        let ana_states = groups.map(|group| (*group, AnaState::Inaccessible)).collect();
        Self { membership, ana_states, closing: Vec::new(), status }
    }

    pub(super) fn ana_states(&self) -> BTreeMap<u32, AnaState> {
        self.ana_states.clone()
    }

    /// Publishes controller identifiers and addresses of the other gateways to the service.
    pub(super) fn publish_to(&self, service: &Service) {
        let status = &self.status;
        let range = |slot| {
            let (first, count) = controller_ids_of_slot(slot);
            (first, first + count - 1)
        };
        let others = status.members.iter().filter(|(name, _)| **name != status.name);
        let addresses = others.flat_map(|(_, member)| {
            // Port numbers of this process are low.
            let port = PORT_OF_SLOTS + member.slot;
            member.addresses.iter().filter_map(move |text| Some((port, text.parse().ok()?)))
        });
        let session = self.membership.session.clone();
        service.set_gateway_group(GatewayGroupView {
            controller_ids: status.slot.map(range),
            addresses: addresses.collect(),
            has_ended: Arc::new(move |now, cntlid| {
                slot_of_controller_id(cntlid).is_some_and(|slot| session.has_slot_ended(now, slot))
            }),
        });
    }
}

/// First port number of other gateways in the discovery log page.
const PORT_OF_SLOTS: u16 = 0x8000;

impl LiveConfig {
    /// The device of a new namespace: opened, or in a gateway group unopened. None if its geometry is not known.
    pub(super) fn open_or_await_device(
        &self,
        requested: &NamespaceConfig,
    ) -> Result<Option<LiveNamespace>, ApplyError> {
        let Some(group) = &self.group else {
            return self.open_device(requested, HOLDER).map(Some);
        };
        if group.ana_states.get(&requested.ana_group) == Some(&AnaState::Optimized) {
            return self.open_leased_device(requested).map(Some);
        }
        let snapshot = group.membership.session.snapshot();
        let nqn = self.nqn_of(requested);
        let record = nqn.and_then(|nqn| namespace(&snapshot, &nqn, requested.nsid));
        let limits = record.as_ref().and_then(NamespaceRecord::limits);
        limits.map(|limits| self.unopened_namespace(requested, limits)).transpose()
    }

    /// NQN of the subsystem of a namespace that is configured already.
    fn nqn_of(&self, requested: &NamespaceConfig) -> Option<String> {
        let config = self.configuration.as_ref()?;
        let mut subsystems = config.subsystems.iter();
        Some(subsystems.find(|one| one.namespaces.contains(requested))?.nqn.clone())
    }

    /// Executes what the membership demands, and publishes what has changed in the group.
    pub(in crate::commands::serve::nvme_tcp) fn drive_group(&mut self) {
        let Some(group) = &self.group else { return };
        let session = group.membership.session.clone();
        while let Some(action) = session.next_action() {
            match action {
                Action::Fence { group, names } => {
                    let is_fenced = self.fence_ana_group(group, &names);
                    session.handle_fenced(group, is_fenced);
                }
                Action::Configure { configuration } => {
                    let is_applied = self.adopt_configuration(&configuration);
                    session.handle_configured(configuration, is_applied);
                }
                Action::Open { group } => {
                    let opened = self.open_ana_group(group);
                    session.handle_opened(group, opened);
                }
                Action::Activate { group } => {
                    self.set_ana_state(group, AnaState::Optimized);
                    tracing::info!(event = "group-active", "group: serves ANA group {group}");
                }
                Action::Close { group } => {
                    if session.status().state == MemberState::AwaitingClose {
                        // The next owner blocklists the clients of this membership.
                        fence::retire_clients();
                    }
                    self.close_ana_group(group);
                }
            }
        }
        self.finish_closing(&session);
        self.publish_group(&session);
    }

    /// Releases all ANA groups. Returns whether that is done.
    pub(in crate::commands::serve::nvme_tcp) fn leave_group(&mut self) -> bool {
        let Some(group) = &self.group else { return true };
        let session = group.membership.session.clone();
        session.leave();
        self.drive_group();
        session.status().state == MemberState::Left
    }

    /// Has the media of an ANA group reject former owners: the clusters of images and the pools of volumes. Returns whether
    /// they do.
    fn fence_ana_group(&self, ana_group: u32, names: &[String]) -> bool {
        let shown = names.join(", ");
        let (clients, pools): (Vec<String>, Vec<String>) =
            names.iter().cloned().partition(|name| fence::is_client_name(name));
        let fenced = fence::blocklist_clients(self.uris_of(ana_group), &clients).and_then(|()| {
            self.with_opener(|opener| {
                pool::take_over_pools(opener, self.uris_of(ana_group), &pools)
            })
        });
        match &fenced {
            Ok(()) => tracing::info!(
                event = "group-fenced",
                "group: ANA group {ana_group}: the former owner is fenced: {shown}"
            ),
            Err(error) => tracing::error!(
                cause = %shown,
                event = "group-refused",
                "group: ANA group {ana_group} is left to another gateway: {error}"
            ),
        }
        fenced.is_ok()
    }

    /// Names of this gateway at the media of an ANA group, which the next owner fences.
    fn names_of_owner(&self, ana_group: u32) -> Result<BTreeSet<String>, Error> {
        let mut names = BTreeSet::new();
        for uri in self.uris_of(ana_group) {
            names.extend(fence::client_names(uri));
            names.extend(self.with_opener(|opener| pool::owner_names(opener, uri))?);
        }
        Ok(names)
    }

    fn uris_of(&self, ana_group: u32) -> impl Iterator<Item = &Uri> {
        let namespaces = self.subsystems.iter().flat_map(|stood| &stood.requested.namespaces);
        namespaces.filter(move |it| it.ana_group == ana_group).map(|it| &it.uri)
    }

    /// Gives up an ANA group whose device was removed: its medium is lost to this gateway, and not to others.
    pub(super) fn give_up_ana_group(&self, lost: &LiveNamespace) {
        let Some(group) = &self.group else { return };
        let LiveNamespace { requested, served, .. } = lost;
        let reason = served.failure_reason().unwrap_or_else(|| "it was removed".to_owned());
        tracing::error!(
            cause = %requested.uri,
            event = "group-refused",
            "group: ANA group {} is left to another gateway: {:#}: {reason}",
            requested.ana_group,
            requested.uri
        );
        group.membership.session.handle_lost_device(requested.ana_group);
    }

    /// Has the other gateways of the group adopt a configuration of this one, before it is served.
    pub(super) fn agree_with_group(&self, text: &str, source: ChangeSource) -> Result<(), Error> {
        let Some(group) = self.group.as_ref().filter(|_| source == ChangeSource::Local) else {
            return Ok(());
        };
        // The first configuration is compared when the gateway joins.
        if self.configuration.is_none() {
            return Ok(());
        }
        match SharedConfig::of_config(text) {
            Some(shared) if SharedConfig::of_config(&self.text).as_ref() != Some(&shared) => {
                group.membership.session.change_configuration(&shared)
            }
            _ => Ok(()),
        }
    }

    /// Applies a change of another gateway. Returns whether it is served.
    fn adopt_configuration(&mut self, record: &str) -> bool {
        let before = self.configuration.clone();
        let applied = self.apply_shared(record);
        let difference = match (&before, &self.configuration) {
            (Some(before), Some(after)) => before.difference_to(after).join("; "),
            _ => String::new(),
        };
        match &applied {
            Ok(changes) => {
                tracing::info!(
                    event = "group-configuration",
                    "group: another gateway has changed the configuration: {difference}"
                );
                for failed in &changes.failed {
                    tracing::warn!(cause = %failed, "group: {failed}");
                }
            }
            Err(error) => tracing::error!(
                cause = %error,
                event = "group-configuration-refused",
                "group: a change of another gateway cannot be served here: {error}"
            ),
        }
        applied.is_ok()
    }

    fn apply_shared(&mut self, record: &str) -> Result<AppliedChanges, Error> {
        let text = SharedConfig::of_record(record).and_then(|shared| shared.apply_to(&self.text));
        let Some(text) = text else {
            let text = "the configuration in the store is no list of subsystems, expected one of this program";
            return Err(Error::environment(text));
        };
        let config = TargetConfig::parse(&text)
            .map_err(|wrong| Error::usage(format!("{}: {}", wrong.key, wrong.problem)))?;
        let (file, former) = (self.context.file.clone(), self.text.clone());
        // What the others serve is served, whether the file can be written or not.
        let save = || {
            let saved = save_text(file.as_deref(), &former, &text);
            Ok(saved.unwrap_or_else(|error| Some(error.to_string())))
        };
        let requested = ConfigWithText { config, text: text.clone() };
        self.apply_and_save(requested, ChangeSource::Group, save).map_err(|unfit| unfit.refused)
    }

    /// Why the gateway cannot join with the configuration of its start, if it cannot.
    pub(in crate::commands::serve::nvme_tcp) fn refusal_of_group(&self) -> Option<Error> {
        let group = self.group.as_ref()?.membership.session.differing_configuration()?;
        let own = SharedConfig::of_config(&self.text)?;
        let name = self.configuration.as_ref()?.group.as_ref()?.name.clone();
        let text = format!(
            "join group {name}: the configuration differs from that of its gateways: {}",
            own.differences_from(&group).join("; ")
        );
        let hint = "make the files equal; the first gateway that joins while no other is there defines the configuration";
        Some(Error::usage(text).with_hint(hint))
    }

    /// Opens the devices of an ANA group, or none of them.
    fn open_ana_group(&mut self, ana_group: u32) -> Option<OpenedGroup> {
        self.set_ana_state(ana_group, AnaState::Change);
        let mut opened = Vec::new();
        for (at, stood) in self.subsystems.iter().enumerate() {
            for requested in
                stood.requested.namespaces.iter().filter(|it| it.ana_group == ana_group)
            {
                match self.open_leased_device(requested) {
                    Ok(served) => opened.push((at, served)),
                    Err(error) => {
                        tracing::error!(
                            cause = %requested.uri,
                            event = "group-refused",
                            "group: ANA group {ana_group} is left to another gateway: {}",
                            error.refused.text
                        );
                        return None;
                    }
                }
            }
        }
        let names = match self.names_of_owner(ana_group) {
            Ok(names) => names.into_iter().collect(),
            Err(error) => {
                tracing::error!(
                    cause = %error,
                    event = "group-refused",
                    "group: ANA group {ana_group} is left to another gateway: {error}"
                );
                return None;
            }
        };
        let mut result = OpenedGroup { names, ..OpenedGroup::default() };
        for (at, served) in opened {
            let nqn = self.subsystems[at].requested.nqn.clone();
            let record = NamespaceRecord::of_limits(&served.served.limits());
            result.records.insert(namespace_key(&nqn, served.requested.nsid), encode(&record));
            self.replace_namespace(at, served);
        }
        self.publish_controls(&self.subsystems);
        self.publish();
        Some(result)
    }

    fn close_ana_group(&mut self, ana_group: u32) {
        self.set_ana_state(ana_group, AnaState::Inaccessible);
        let mut closing = ClosingDevices::default();
        for at in 0..self.subsystems.len() {
            let open: Vec<LiveNamespace> = self.subsystems[at]
                .namespaces
                .iter()
                .filter(|it| it.requested.ana_group == ana_group && it.description != UNOPENED)
                .cloned()
                .collect();
            for served in open {
                closing.add_device(served.device.clone());
                match self.unopened_namespace(&served.requested, served.served.limits()) {
                    Ok(unopened) => self.replace_namespace(at, unopened),
                    Err(error) => {
                        tracing::error!(cause = %served.requested.uri, "group: {}", error.refused.text);
                        let stood = &mut self.subsystems[at];
                        stood.subsystem.remove_namespace(served.requested.nsid);
                        stood.namespaces.retain(|it| it.requested.nsid != served.requested.nsid);
                    }
                }
            }
        }
        self.publish_controls(&self.subsystems);
        self.publish();
        tracing::info!(event = "group-inactive", "group: no longer serves ANA group {ana_group}");
        if let Some(group) = &mut self.group {
            group.closing.push((ana_group, closing));
        }
    }

    /// Reports ANA groups whose devices are closed.
    fn finish_closing(&mut self, session: &GroupSession) {
        let Some(group) = &mut self.group else { return };
        group.closing.retain_mut(|(ana_group, closing)| {
            closing.close_unused();
            let is_closed = closing.is_empty();
            if is_closed {
                session.handle_closed(*ana_group);
            }
            !is_closed
        });
    }

    fn publish_group(&mut self, session: &GroupSession) {
        let status = session.status();
        let Some(group) = self.group.as_mut().filter(|group| group.status != status) else {
            return;
        };
        log_changes(&group.status, &status);
        group.status = status;
        group.publish_to(&self.context.service);
        self.add_recorded_namespaces(session);
    }

    /// Adds namespaces whose geometry another gateway has recorded meanwhile.
    fn add_recorded_namespaces(&mut self, session: &GroupSession) {
        let snapshot = session.snapshot();
        for at in 0..self.subsystems.len() {
            let stood = &self.subsystems[at];
            let is_there = |nsid| stood.namespaces.iter().any(|it| it.requested.nsid == nsid);
            let absent = stood.requested.namespaces.iter().filter(|it| !is_there(it.nsid));
            let known = absent.filter_map(|requested| {
                let record = namespace(&snapshot, &stood.requested.nqn, requested.nsid)?;
                self.unopened_namespace(requested, record.limits()?).ok()
            });
            let known: Vec<LiveNamespace> = known.collect();
            known.into_iter().for_each(|unopened| self.replace_namespace(at, unopened));
        }
    }

    fn set_ana_state(&mut self, ana_group: u32, state: AnaState) {
        let Some(group) = &mut self.group else { return };
        group.ana_states.insert(ana_group, state);
        for stood in &mut self.subsystems {
            stood.ana_states.insert(ana_group, state);
            stood.update_ana_states(&self.listeners, &self.context);
        }
    }

    fn open_leased_device(&self, requested: &NamespaceConfig) -> Result<LiveNamespace, ApplyError> {
        let mut served = self.open_device(requested, HOLDER)?;
        let Some(group) = &self.group else { return Ok(served) };
        let lease = group.membership.lease_end.clone();
        let leased = LeasedDevice::new(Arc::clone(&served.served), lease);
        let leased = leased.map_err(|why| ApplyError {
            refused: Error::new(why.category(), format!("serve {:#}: {why}", requested.uri)),
            line: requested.line,
            key: "uri",
        })?;
        served.served = Arc::new(leased);
        // What is acknowledged is on the medium: there is no cache to confirm.
        served.cache = None;
        Ok(served)
    }

    fn unopened_namespace(
        &self,
        requested: &NamespaceConfig,
        limits: Limits,
    ) -> Result<LiveNamespace, ApplyError> {
        let refuse = |refused| ApplyError { refused, line: requested.line, key: "uri" };
        let options = BdevOptions::new(self.context.clock, 1);
        let medium = Arc::new(UnopenedDevice::new(limits));
        let device =
            Bdev::new(&requested.uri.to_string(), medium.clone(), options).map_err(refuse)?;
        let descriptor = device.open(Claim::ReadShared, HOLDER);
        let descriptor = descriptor.map_err(|why| refuse(Error::environment(why.to_string())))?;
        Ok(LiveNamespace {
            requested: requested.clone(),
            description: UNOPENED.to_owned(),
            device,
            descriptor: Arc::new(descriptor),
            served: medium,
            cache: None,
            handles: Vec::new(),
            identities: Vec::new(),
        })
    }

    /// Serves a namespace in place of one with its NSID, or adds it.
    fn replace_namespace(&mut self, at: usize, served: LiveNamespace) {
        let stood = &mut self.subsystems[at];
        let nsid = served.requested.nsid;
        let found = stood.namespaces.iter_mut().find(|it| it.requested.nsid == nsid);
        match found {
            Some(before) => {
                let device = Arc::clone(&served.served);
                self.context.service.replace_namespace_device(&stood.requested.nqn, nsid, device);
                *before = served;
            }
            None => {
                let config = served.namespace_config(None);
                match self.context.service.add_namespace(&stood.requested.nqn, config) {
                    Ok(_) => stood.namespaces.push(served),
                    Err(error) => {
                        let uri = &served.requested.uri;
                        tracing::error!(cause = %uri, "group: cannot serve {uri:#}: {error}");
                    }
                }
            }
        }
    }
}

/// Holder of the claims.
const HOLDER: &str = "nvme-tcp";
/// Description of a device that is not open here.
const UNOPENED: &str = "another gateway of the group has it open";

/// Rejects changes of what is fixed at start.
pub(super) fn check_group_unchanged(
    before: &TargetConfig,
    requested: &TargetConfig,
) -> Result<(), ApplyError> {
    let line = requested.group.as_ref().map(GroupConfig::line).unwrap_or_default();
    let refuse = |text: &str| {
        let hint = "start the process again; the other gateways serve its ANA groups meanwhile";
        let refused = Error::usage(text).with_hint(hint);
        Err(ApplyError { refused, line, key: "group" })
    };
    if before.group != requested.group {
        return refuse("the gateway group is another, expected that of the start");
    }
    let groups = |config: &TargetConfig| GroupConfig::ana_groups(&config.subsystems);
    if before.group.is_some() && groups(before) != groups(requested) {
        return refuse("the namespaces are in other ANA groups, expected those of the start");
    }
    Ok(())
}

fn log_changes(before: &MemberStatus, after: &MemberStatus) {
    if before.state != after.state {
        let is_lost = after.state == MemberState::AwaitingClose;
        match is_lost {
            true => tracing::warn!(
                event = "group-lease-lost",
                "group: the lease is lost: nothing is served"
            ),
            false => {
                tracing::info!("group: {}, {} members", after.state.name(), after.members.len())
            }
        }
    }
    for name in after.members.keys().filter(|name| !before.members.contains_key(*name)) {
        tracing::info!(event = "group-joined", "group: {name} has joined");
    }
    for name in before.members.keys().filter(|name| !after.members.contains_key(*name)) {
        tracing::warn!(event = "group-left", "group: {name} has left, or its lease has ended");
    }
    if before.store_trouble.is_none()
        && let Some(trouble) = &after.store_trouble
    {
        tracing::warn!(cause = %trouble, "group: the store does not reply: {trouble}");
    }
    for (group, phase) in &after.phases {
        if before.phases.get(group) != Some(phase) && *phase == GroupPhase::Opening {
            tracing::info!("group: takes over ANA group {group}");
        }
    }
}
