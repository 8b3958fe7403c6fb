//! Get Features and Set Features (Base 2.1 §5.1.11, §5.1.25).

use tenmil_base::Instant;
use tenmil_wire::Status;
use tenmil_wire::admin::{FeatureSelect, GetFeatures, SetFeatures};
use tenmil_wire::feature::Feature;

use super::{
    FeatureAttributes, FeatureKey, FeatureSupport, OVER, UNDER, check_value, default_value,
    find_feature,
};
use crate::controller::Controller;
use crate::controller::commands::CommandResult;
use crate::controller::io_queue_commands::GrantedQueues;
use crate::controller::reservation::HostId;
use crate::controller::subsystem::{SubsystemState, WriteProtection};
use crate::controller::transport_interface::{AdminOutcome, AdminResult};

/// Timestamp, as set by a host (Base 2.1 §5.1.25.1.10).
#[derive(Clone, Copy, Debug, Default)]
pub(in crate::controller) struct Timestamp {
    set: Option<(Instant, u64)>,
}

/// TMPSEL (Base 2.1 §5.1.25.1.3): the composite temperature, the only supported sensor.
const COMPOSITE: u32 = 0;
/// TMPSEL for all sensors.
const EVERY_SENSOR: u32 = 0xf;

impl Timestamp {
    /// Sets the 48-bit timestamp.
    fn set_milliseconds(&mut self, now: Instant, data: &[u8]) {
        let mut bytes = [0; 8];
        bytes[..6].copy_from_slice(data.get(..6).unwrap_or(&[0; 6]));
        self.set = Some((now, u64::from_le_bytes(bytes)));
    }

    /// Milliseconds counted from the set value, and the timestamp origin (Figure 405).
    pub(in crate::controller) fn to_bytes(self, now: Instant) -> [u8; 8] {
        let (start, ms, origin) = match self.set {
            Some((at, ms)) => (at, ms, 0b001),
            None => (Instant { ns: 0 }, 0, 0b000),
        };
        let ms = (ms + now.since(start).ns / 1_000_000) & 0xffff_ffff_ffff;
        (ms | origin << 49).to_le_bytes()
    }
}

impl Controller {
    /// Data bytes returned by a Get Features command.
    pub(in crate::controller) fn get_features_data_len(
        &self,
        get: &GetFeatures,
    ) -> Result<u32, Status> {
        let attributes = self.feature_attributes(get.fid)?;
        match get.sel {
            FeatureSelect::SupportedCapabilities => Ok(0),
            FeatureSelect::Reserved(_) => Err(Status::INVALID_FIELD),
            _ => Ok(feature_data_len(attributes.feature, get.cdw11)),
        }
    }

    /// Data bytes of a Set Features command.
    pub(in crate::controller) fn set_features_data_len(
        &self,
        set: &SetFeatures,
    ) -> Result<u32, Status> {
        Ok(feature_data_len(self.feature_attributes(set.fid)?.feature, set.cdw11))
    }

    pub(in crate::controller) fn get_features(
        &mut self,
        now: Instant,
        get: &GetFeatures,
        data: &mut Vec<u8>,
    ) -> CommandResult {
        let attributes = self.feature_attributes(get.fid)?;
        let subsystem = self.subsystem.clone();
        let state = subsystem.lock_state();
        // The NSID is ignored for features with controller scope: tools that operate on a block device
        // pass it with every feature.
        let nsids = match attributes.is_per_namespace {
            true => self.selected_nsids(&state, get.nsid)?,
            false => Vec::new(),
        };
        if attributes.is_per_namespace && get.nsid == u32::MAX {
            return Err(Status::INVALID_NAMESPACE_OR_FORMAT);
        }
        let nsid = nsids.first().copied().unwrap_or(0);
        let feature = attributes.feature;
        let dword = match get.sel {
            FeatureSelect::Current => self.current_feature_value(&state, now, get, nsid, data)?,
            FeatureSelect::Default | FeatureSelect::Saved => {
                data.clear();
                data.resize(feature_data_len(attributes.feature, get.cdw11) as usize, 0);
                let key = FeatureKey { feature, selector: feature_selector(get, nsid)? };
                match get.sel {
                    FeatureSelect::Saved => self.values.saved(key),
                    _ if feature == Feature::NumberOfQueues => {
                        GrantedQueues::new(self.config.io_queues_max).completion_dword0()
                    }
                    _ => default_value(key),
                }
            }
            // Saveable, namespace specific, changeable (Base 2.1 §5.1.11.1).
            FeatureSelect::SupportedCapabilities => {
                u32::from(attributes.is_saveable)
                    | u32::from(attributes.is_per_namespace) << 1
                    | 1 << 2
            }
            FeatureSelect::Reserved(_) => return Err(Status::INVALID_FIELD),
        };
        Ok(AdminOutcome::Done(AdminResult::success_with(dword)))
    }

    pub(in crate::controller) fn set_features(
        &mut self,
        now: Instant,
        cid: u16,
        set: &SetFeatures,
        data: &[u8],
    ) -> CommandResult {
        let attributes = self.feature_attributes(set.fid)?;
        if set.sv && !attributes.is_saveable {
            return Err(Status::FEATURE_NOT_SAVEABLE);
        }
        let has_ana = self.subsystem.constants().ana_groups > 0;
        check_value(attributes.feature, set.cdw11, &self.config, has_ana)?;
        let subsystem = self.subsystem.clone();
        let mut state = subsystem.lock_state();
        let nsids = self.feature_nsids(&state, attributes, set.nsid)?;
        // Completed only after the reservation store has made the change durable.
        if attributes.feature == Feature::ReservationPersistence {
            return self.set_reservation_persistence(state, cid, &nsids, set.cdw11 & 1 != 0);
        }
        let result = if attributes.is_per_namespace {
            for nsid in nsids {
                self.set_namespace_feature(&mut state, set, nsid)?;
            }
            0
        } else if attributes.feature == Feature::HostIdentifier {
            self.set_host_identifier(&mut state, set.cdw11, data)?
        } else {
            self.set_controller_feature(now, set, data)?
        };
        subsystem.publish_and_notify(state);
        self.raise_health_events();
        Ok(AdminOutcome::Done(AdminResult::success_with(result)))
    }

    /// Attributes of the feature, if this controller supports it.
    pub(in crate::controller) fn feature_attributes(
        &self,
        fid: u8,
    ) -> Result<FeatureAttributes, Status> {
        let support = FeatureSupport {
            volatile_cache: self.has_volatile_cache(),
            reservations: self.subsystem.constants().reservations,
        };
        find_feature(Feature::from_code(fid), &self.config, support).ok_or(Status::INVALID_FIELD)
    }

    /// Namespaces whose value is set; none if the feature has controller scope.
    fn feature_nsids(
        &self,
        state: &SubsystemState,
        attributes: FeatureAttributes,
        nsid: u32,
    ) -> Result<Vec<u32>, Status> {
        if attributes.is_per_namespace {
            return self.selected_nsids(state, nsid);
        }
        match nsid {
            0 | u32::MAX => Ok(Vec::new()),
            _ => Err(Status::FEATURE_NOT_NAMESPACE_SPECIFIC),
        }
    }

    fn current_feature_value(
        &self,
        state: &SubsystemState,
        now: Instant,
        get: &GetFeatures,
        nsid: u32,
        data: &mut Vec<u8>,
    ) -> Result<u32, Status> {
        data.clear();
        let feature = Feature::from_code(get.fid);
        let record = state.records.get(&nsid);
        let dword = match feature {
            Feature::PowerManagement => {
                let hint = self.values.current(FeatureKey { feature, selector: 0 }) & 0xe0;
                u32::from(self.power.state()) | hint
            }
            Feature::NumberOfQueues => self.granted.completion_dword0(),
            Feature::KeepAliveTimer => self.keep_alive.timeout_ms(),
            Feature::AutonomousPowerStateTransition => {
                data.extend(self.power.transition_table());
                self.power.is_autonomous.into()
            }
            Feature::Timestamp => {
                data.extend(self.timestamp.to_bytes(now));
                0
            }
            Feature::HostBehaviorSupport => {
                data.push(self.has_advanced_retry.into());
                data.resize(512, 0);
                0
            }
            Feature::HostIdentifier => self.append_host_identifier(get.cdw11 & 1 != 0, data)?,
            Feature::ReservationPersistence => record
                .is_some_and(|record| record.reservations.persists_through_power_loss())
                .into(),
            Feature::NamespaceWriteProtection => {
                record.map_or(0, |record| record.protection as u32)
            }
            _ => {
                self.values.current(FeatureKey { feature, selector: feature_selector(get, nsid)? })
            }
        };
        Ok(dword)
    }

    /// Sets a feature of this controller.
    fn set_controller_feature(
        &mut self,
        now: Instant,
        set: &SetFeatures,
        data: &[u8],
    ) -> Result<u32, Status> {
        let dword = set.cdw11;
        let feature = Feature::from_code(set.fid);
        let key = FeatureKey { feature, selector: 0 };
        match feature {
            Feature::NumberOfQueues => {
                return self.granted.negotiate(dword, self.config.io_queues_max);
            }
            Feature::KeepAliveTimer => self.keep_alive.set_timeout(now, dword)?,
            Feature::AutonomousPowerStateTransition => {
                self.power.set_transition_table(data)?;
                self.power.is_autonomous = dword & 1 != 0;
            }
            Feature::Timestamp => self.timestamp.set_milliseconds(now, data),
            Feature::HostBehaviorSupport => self.set_host_behavior(data)?,
            Feature::TemperatureThreshold => {
                let of = decode_threshold_selector(dword, true)?;
                self.values.set_value(FeatureKey { feature, selector: of }, dword & 0xffff, set.sv);
            }
            Feature::InterruptVectorConfiguration => {
                self.values.set_value(
                    FeatureKey { feature, selector: dword & 0xffff },
                    dword,
                    set.sv,
                );
            }
            Feature::PowerManagement => {
                self.power.set_state(now, dword.to_le_bytes()[0] & 0x1f)?;
                self.values.set_value(key, dword, set.sv);
            }
            _ => self.values.set_value(key, dword, set.sv),
        }
        Ok(0)
    }

    /// Sets a feature of one namespace.
    fn set_namespace_feature(
        &mut self,
        state: &mut SubsystemState,
        set: &SetFeatures,
        nsid: u32,
    ) -> Result<(), Status> {
        let record = state.records.get_mut(&nsid).ok_or(Status::INVALID_NAMESPACE_OR_FORMAT)?;
        let feature = Feature::from_code(set.fid);
        match feature {
            Feature::NamespaceWriteProtection => {
                let wanted = WriteProtection::from_code(set.cdw11).ok_or(Status::INVALID_FIELD)?;
                let is_final = matches!(
                    record.protection,
                    WriteProtection::UntilPowerCycle | WriteProtection::Permanent
                );
                if is_final && wanted != record.protection {
                    return Err(Status::FEATURE_NOT_CHANGEABLE);
                }
                record.protection = wanted;
                state.notify_namespace_changed(nsid);
            }
            _ => self.values.set_value(FeatureKey { feature, selector: nsid }, set.cdw11, set.sv),
        }
        Ok(())
    }

    /// Sets Host Behavior Support; only Advanced Command Retry Enable is supported (Base 2.1
    /// §5.1.25.1.14).
    fn set_host_behavior(&mut self, data: &[u8]) -> Result<(), Status> {
        let (&retry, rest) = data.split_first().ok_or(Status::INVALID_FIELD)?;
        if retry > 1 || rest.iter().take(5).any(|&byte| byte != 0) {
            return Err(Status::INVALID_FIELD);
        }
        self.has_advanced_retry = retry == 1;
        Ok(())
    }

    /// Sets the host identifier: once, and not over fabrics, where Connect sets it (Base 2.1
    /// §5.1.25.1.28).
    fn set_host_identifier(
        &mut self,
        state: &mut SubsystemState,
        dword: u32,
        data: &[u8],
    ) -> Result<u32, Status> {
        if self.is_fabrics() {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        let host = parse_host_identifier(dword & 1 != 0, data)
            .unwrap_or(HostId::Anonymous(self.config.cntlid));
        if !matches!(self.host, HostId::Anonymous(_)) && host != self.host {
            return Err(Status::COMMAND_SEQUENCE_ERROR);
        }
        // All hosts of a subsystem use the same identifier length (Base 2.1 §5.1.25.1.28).
        let other_width = |other: HostId| {
            matches!(
                (host, other),
                (HostId::Short(_), HostId::Extended(_)) | (HostId::Extended(_), HostId::Short(_))
            )
        };
        if state.controllers.values().any(|entry| other_width(entry.host)) {
            return Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT);
        }
        self.host = host;
        if let Some(entry) = state.controllers.get_mut(&self.config.cntlid) {
            entry.host = host;
        }
        Ok(0)
    }

    fn append_host_identifier(&self, is_extended: bool, data: &mut Vec<u8>) -> Result<u32, Status> {
        match (self.host, is_extended) {
            (HostId::Anonymous(_), false) => data.extend([0; 8]),
            (HostId::Anonymous(_), true) => data.extend([0; 16]),
            (HostId::Short(id), false) => data.extend(id.to_le_bytes()),
            (HostId::Extended(id), true) => data.extend(id.to_le_bytes()),
            _ => return Err(Status::HOST_IDENTIFIER_INCONSISTENT_FORMAT),
        }
        Ok(u32::from(is_extended))
    }
}

/// Host with this identifier; `None` for zeroes.
fn parse_host_identifier(is_extended: bool, data: &[u8]) -> Option<HostId> {
    let host = if is_extended {
        HostId::Extended(u128::from_le_bytes(*data.first_chunk()?))
    } else {
        HostId::Short(u64::from_le_bytes(*data.first_chunk()?))
    };
    (!matches!(host, HostId::Extended(0) | HostId::Short(0))).then_some(host)
}

/// Data bytes of a feature's value; a host identifier has two lengths.
fn feature_data_len(feature: Feature, dword: u32) -> u32 {
    u32::try_from(feature.len_bytes(dword & 1 != 0)).unwrap_or(0)
}

/// Selector of a feature's value, from dword 11 or the namespace.
fn feature_selector(get: &GetFeatures, nsid: u32) -> Result<u32, Status> {
    match Feature::from_code(get.fid) {
        Feature::TemperatureThreshold => decode_threshold_selector(get.cdw11, false),
        Feature::InterruptVectorConfiguration => Ok(get.cdw11 & 0xffff),
        _ => Ok(nsid),
    }
}

/// Decodes the selected temperature threshold.
fn decode_threshold_selector(dword: u32, may_be_all: bool) -> Result<u32, Status> {
    let (sensor, which) = (dword >> 16 & 0xf, dword >> 20 & 3);
    let is_sensor = sensor == COMPOSITE || (sensor == EVERY_SENSOR && may_be_all);
    if is_sensor && [OVER, UNDER].contains(&which) { Ok(which) } else { Err(Status::INVALID_FIELD) }
}
