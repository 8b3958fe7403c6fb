//! Features: the supported ones, their attributes, and the values of those that are a single dword (Base
//! 2.1 §5.1.25).
//!
//! ```text
//!   Get / Set Features ─▶ attributes (saveable? changeable? ─▶ dword:   Values, in this file
//!                         per namespace?)                   └▶ others:  commands.rs, which reads
//!                                                              the owner of the value
//! ```

use std::collections::BTreeMap;

use tenmil_base::Span;
use tenmil_wire::Status;
use tenmil_wire::feature::Feature;

use super::config::{ControllerConfig, TransportModel};
use super::health::{TemperatureThresholds, WARNING_KELVIN};
use super::transport_interface::{Arbitration, IoQueueCoalescing};

pub(super) mod commands;
pub(super) mod reservation_persistence;

/// Attributes of a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FeatureAttributes {
    pub(super) feature: Feature,
    /// A value may be saved, and then survives resets.
    pub(super) is_saveable: bool,
    /// The value belongs to a namespace, not to the controller.
    pub(super) is_per_namespace: bool,
    /// Condition under which the feature is supported.
    requirement: FeatureRequirement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum FeatureRequirement {
    Always,
    /// A block device with a volatile cache.
    VolatileCache,
    /// Queues created by command and signalled by interrupt vectors.
    MemoryTransport,
    Reservations,
}

/// Conditions for optional features, apart from the controller's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct FeatureSupport {
    /// A block device has a volatile cache.
    pub(super) volatile_cache: bool,
    /// Reservations are supported.
    pub(super) reservations: bool,
}

const fn default_attributes(feature: Feature) -> FeatureAttributes {
    FeatureAttributes {
        feature,
        is_saveable: false,
        is_per_namespace: false,
        requirement: FeatureRequirement::Always,
    }
}

const fn saveable_attributes(feature: Feature) -> FeatureAttributes {
    FeatureAttributes { is_saveable: true, ..default_attributes(feature) }
}

/// All known features, by identifier.
pub(super) const FEATURES: [FeatureAttributes; 19] = [
    saveable_attributes(Feature::Arbitration),
    saveable_attributes(Feature::PowerManagement),
    saveable_attributes(Feature::TemperatureThreshold),
    FeatureAttributes { is_per_namespace: true, ..saveable_attributes(Feature::ErrorRecovery) },
    FeatureAttributes {
        requirement: FeatureRequirement::VolatileCache,
        ..saveable_attributes(Feature::VolatileWriteCache)
    },
    default_attributes(Feature::NumberOfQueues),
    FeatureAttributes {
        requirement: FeatureRequirement::MemoryTransport,
        ..saveable_attributes(Feature::InterruptCoalescing)
    },
    FeatureAttributes {
        requirement: FeatureRequirement::MemoryTransport,
        ..saveable_attributes(Feature::InterruptVectorConfiguration)
    },
    saveable_attributes(Feature::WriteAtomicity),
    saveable_attributes(Feature::AsynchronousEventConfiguration),
    default_attributes(Feature::AutonomousPowerStateTransition),
    default_attributes(Feature::Timestamp),
    default_attributes(Feature::KeepAliveTimer),
    default_attributes(Feature::HostBehaviorSupport),
    saveable_attributes(Feature::SoftwareProgressMarker),
    default_attributes(Feature::HostIdentifier),
    FeatureAttributes {
        is_per_namespace: true,
        requirement: FeatureRequirement::Reservations,
        ..default_attributes(Feature::ReservationNotificationMask)
    },
    FeatureAttributes {
        is_per_namespace: true,
        requirement: FeatureRequirement::Reservations,
        ..default_attributes(Feature::ReservationPersistence)
    },
    FeatureAttributes {
        is_per_namespace: true,
        ..default_attributes(Feature::NamespaceWriteProtection)
    },
];

/// Bits of the Asynchronous Event Configuration (Base 2.1 §5.1.25.1.5).
pub(super) mod event_bit {
    /// The bits of the Critical Warning byte. No field reports which of them a controller raises, and
    /// hosts set all of them, so bits without an event are accepted, too.
    pub(in crate::controller) const WARNINGS: u32 = 0xff;
    /// Namespace Attribute Notices.
    pub(in crate::controller) const NAMESPACE: u32 = 1 << 8;
    /// Firmware Activation Notices.
    pub(in crate::controller) const FIRMWARE: u32 = 1 << 9;
    /// Telemetry Log Notices: accepted, because hosts set the bit if LPA reports telemetry. They never
    /// occur.
    pub(in crate::controller) const TELEMETRY: u32 = 1 << 10;
    /// Asymmetric Namespace Access Change Notices.
    pub(in crate::controller) const ANA: u32 = 1 << 11;
}

/// Values of the features that are a single dword.
#[derive(Clone, Debug, Default)]
pub(super) struct FeatureValues {
    table: BTreeMap<FeatureKey, FeatureValue>,
}

/// Feature, and a selector for its value: a namespace, a vector, a sensor; 0 if there is only one value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct FeatureKey {
    pub(super) feature: Feature,
    pub(super) selector: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct FeatureValue {
    current: Option<u32>,
    saved: Option<u32>,
}

/// THSEL of [`Feature::TemperatureThreshold`]: over temperature threshold.
pub(super) const OVER: u32 = 0;
/// Under temperature threshold.
pub(super) const UNDER: u32 = 1;

/// Attributes of the feature, if this controller supports it.
pub(super) fn find_feature(
    feature: Feature,
    config: &ControllerConfig,
    support: FeatureSupport,
) -> Option<FeatureAttributes> {
    let attributes = FEATURES.into_iter().find(|attributes| attributes.feature == feature)?;
    let is_supported = match attributes.requirement {
        FeatureRequirement::Always => true,
        FeatureRequirement::VolatileCache => support.volatile_cache,
        FeatureRequirement::MemoryTransport => {
            matches!(config.transport, TransportModel::Memory { .. })
        }
        FeatureRequirement::Reservations => support.reservations,
    };
    is_supported.then_some(attributes)
}

impl FeatureValues {
    /// Current value.
    pub(super) fn current(&self, key: FeatureKey) -> u32 {
        let value = self.table.get(&key).copied().unwrap_or_default();
        value.current.or(value.saved).unwrap_or(default_value(key))
    }

    /// Saved value, which the next reset restores.
    pub(super) fn saved(&self, key: FeatureKey) -> u32 {
        self.table.get(&key).and_then(|value| value.saved).unwrap_or(default_value(key))
    }

    /// Sets the current value, and the saved value if `save`.
    pub(super) fn set_value(&mut self, key: FeatureKey, dword: u32, save: bool) {
        let value = self.table.entry(key).or_default();
        value.current = Some(dword);
        if save {
            value.saved = Some(dword);
        }
    }

    /// Restores the saved values.
    pub(super) fn reset(&mut self) {
        self.table.retain(|_, value| {
            value.current = None;
            value.saved.is_some()
        });
    }

    /// Removes the values of a deleted namespace.
    pub(super) fn forget_namespace(&mut self, nsid: u32) {
        for feature in [Feature::ErrorRecovery, Feature::ReservationNotificationMask] {
            self.table.remove(&FeatureKey { feature, selector: nsid });
        }
    }

    /// Whether the volatile write cache is enabled (Base 2.1 §5.1.25.1.4).
    pub(super) fn write_cache_enabled(&self) -> bool {
        self.current(FeatureKey { feature: Feature::VolatileWriteCache, selector: 0 }) & 1 != 0
    }

    /// Whether the host has enabled the events of this bit.
    pub(super) fn is_event_enabled(&self, bit: u32) -> bool {
        self.current(FeatureKey { feature: Feature::AsynchronousEventConfiguration, selector: 0 })
            & bit
            != 0
    }

    /// Interrupt coalescing.
    pub(super) fn coalescing(&self) -> IoQueueCoalescing {
        let [threshold, time, ..] = self
            .current(FeatureKey { feature: Feature::InterruptCoalescing, selector: 0 })
            .to_le_bytes();
        let time = Span::from_us(100 * u64::from(time));
        IoQueueCoalescing { time, threshold: u16::from(threshold) + 1 }
    }

    /// Whether coalescing is disabled for a vector (Base 2.1 §5.1.25.2.3).
    pub(super) fn is_coalescing_disabled(&self, vector: u16) -> bool {
        self.current(FeatureKey {
            feature: Feature::InterruptVectorConfiguration,
            selector: vector.into(),
        }) & 1 << 16
            != 0
    }

    /// Arbitration of the submission queues.
    pub(super) fn arbitration(&self) -> Arbitration {
        let [burst, low, device, high] =
            self.current(FeatureKey { feature: Feature::Arbitration, selector: 0 }).to_le_bytes();
        let burst = burst & 7;
        Arbitration {
            burst: (burst != 7).then_some(1 << burst),
            low_weight: u16::from(low) + 1,
            medium_weight: u16::from(device) + 1,
            high_weight: u16::from(high) + 1,
        }
    }

    /// Temperature thresholds.
    pub(super) fn temperature_thresholds(&self) -> TemperatureThresholds {
        let kelvin = |of| {
            let dword =
                self.current(FeatureKey { feature: Feature::TemperatureThreshold, selector: of });
            u16::try_from(dword & 0xffff).unwrap_or(0)
        };
        TemperatureThresholds { over_kelvin: kelvin(OVER), under_kelvin: kelvin(UNDER) }
    }
}

/// Default value.
pub(super) fn default_value(key: FeatureKey) -> u32 {
    match key.feature {
        // No limit to a burst, every weight 1.
        Feature::Arbitration => 7,
        Feature::TemperatureThreshold if key.selector == OVER => WARNING_KELVIN.into(),
        Feature::VolatileWriteCache => 1,
        Feature::InterruptVectorConfiguration => key.selector,
        _ => 0,
    }
}

/// Checks dword 11 of Set Features for a feature.
pub(super) fn check_value(
    feature: Feature,
    dword: u32,
    config: &ControllerConfig,
    ana: bool,
) -> Result<(), Status> {
    let allowed = match feature {
        Feature::Arbitration => 0xffff_ff07,
        Feature::PowerManagement => 0xff,
        Feature::TemperatureThreshold => 0x003f_ffff,
        // Time limited error recovery; DULBE (error on deallocated blocks) is not supported.
        Feature::ErrorRecovery => 0xffff,
        Feature::VolatileWriteCache
        | Feature::WriteAtomicity
        | Feature::AutonomousPowerStateTransition => 1,
        Feature::InterruptCoalescing => 0xffff,
        Feature::InterruptVectorConfiguration => {
            if dword & 0xffff >= u32::from(config.vectors) {
                return Err(Status::INVALID_FIELD);
            }
            0x1_ffff
        }
        Feature::AsynchronousEventConfiguration => {
            event_bit::WARNINGS | event_bit::TELEMETRY | supported_notices(ana)
        }
        Feature::HostIdentifier => 1,
        Feature::SoftwareProgressMarker => 0xff,
        // REGPRE, RESREL and RESPRE (Base 2.1 §5.1.25.1.29).
        Feature::ReservationNotificationMask => 0b1110,
        Feature::ReservationPersistence => 1,
        Feature::NamespaceWriteProtection => 0b111,
        _ => u32::MAX,
    };
    if dword & !allowed == 0 { Ok(()) } else { Err(Status::INVALID_FIELD) }
}

/// Supported notices, as in OAES of Identify Controller.
pub(super) const fn supported_notices(ana: bool) -> u32 {
    event_bit::NAMESPACE | event_bit::FIRMWARE | if ana { event_bit::ANA } else { 0 }
}
