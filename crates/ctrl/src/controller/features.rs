//! Features: which there are, what may be done with each, and the values of those that are a dword
//! and nothing else (Base 2.1 §5.1.25).
//!
//! ```text
//!   Get / Set Features ─▶ rule (saveable? changeable? whose?) ─▶ dword:   Values, in this file
//!                                                             └▶ others:  commands.rs, which asks
//!                                                                whoever keeps the value
//! ```

use std::collections::BTreeMap;

use base::Span;
use wire::Status;
use wire::feature::Feature;

use super::config::{ControllerConfig, Transport};
use super::contract::{Arbitration, Coalescing};
use super::health::{Thresholds, WARNING_KELVIN};

pub(super) mod commands;
pub(super) mod persistence;

/// What may be done with a feature.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Rule {
    pub(super) feature: Feature,
    /// A value may be saved, and survives resets.
    pub(super) is_saveable: bool,
    /// Its value belongs to a namespace and not to the controller.
    pub(super) is_per_namespace: bool,
    /// When it is there.
    needs: Needs,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Needs {
    Nothing,
    /// A medium with a volatile cache.
    VolatileCache,
    /// Queues that are made by command and signalled by vector.
    MemoryTransport,
    Reservations,
}

/// What there is to a feature's presence beyond the controller's configuration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Present {
    /// Some medium has a volatile cache.
    pub(super) volatile_cache: bool,
    /// Reservations are offered.
    pub(super) reservations: bool,
}

const fn rule(feature: Feature) -> Rule {
    Rule { feature, is_saveable: false, is_per_namespace: false, needs: Needs::Nothing }
}

const fn saveable(feature: Feature) -> Rule {
    Rule { is_saveable: true, ..rule(feature) }
}

/// Every feature there may be, by identifier.
pub(super) const RULES: [Rule; 19] = [
    saveable(Feature::Arbitration),
    saveable(Feature::PowerManagement),
    saveable(Feature::TemperatureThreshold),
    Rule { is_per_namespace: true, ..saveable(Feature::ErrorRecovery) },
    Rule { needs: Needs::VolatileCache, ..saveable(Feature::VolatileWriteCache) },
    rule(Feature::NumberOfQueues),
    Rule { needs: Needs::MemoryTransport, ..saveable(Feature::InterruptCoalescing) },
    Rule { needs: Needs::MemoryTransport, ..saveable(Feature::InterruptVectorConfiguration) },
    saveable(Feature::WriteAtomicity),
    saveable(Feature::AsynchronousEventConfiguration),
    rule(Feature::AutonomousPowerStateTransition),
    rule(Feature::Timestamp),
    rule(Feature::KeepAliveTimer),
    rule(Feature::HostBehaviorSupport),
    saveable(Feature::SoftwareProgressMarker),
    rule(Feature::HostIdentifier),
    Rule {
        is_per_namespace: true,
        needs: Needs::Reservations,
        ..rule(Feature::ReservationNotificationMask)
    },
    Rule {
        is_per_namespace: true,
        needs: Needs::Reservations,
        ..rule(Feature::ReservationPersistence)
    },
    Rule { is_per_namespace: true, ..rule(Feature::NamespaceWriteProtection) },
];

/// Bits of the Asynchronous Event Configuration (Base 2.1 §5.1.25.1.5).
pub(super) mod event_bit {
    /// The Critical Warning byte, bit for bit. No field says which of them a controller can tell, so
    /// that hosts ask for all: those that never happen here are taken, too.
    pub(in crate::controller) const WARNINGS: u32 = 0xff;
    /// Namespace Attribute Notices.
    pub(in crate::controller) const NAMESPACE: u32 = 1 << 8;
    /// Firmware Activation Notices.
    pub(in crate::controller) const FIRMWARE: u32 = 1 << 9;
    /// Telemetry Log Notices: whoever sees telemetry in LPA asks for them. There are none.
    pub(in crate::controller) const TELEMETRY: u32 = 1 << 10;
    /// Asymmetric Namespace Access Change Notices.
    pub(in crate::controller) const ANA: u32 = 1 << 11;
}

/// The values of features that are a dword.
#[derive(Clone, Debug, Default)]
pub(super) struct Values {
    table: BTreeMap<Key, Value>,
}

/// A feature, and which of its values: a namespace, a vector, a sensor; 0 where there is only one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Key {
    pub(super) feature: Feature,
    pub(super) of: u32,
}

#[derive(Clone, Copy, Debug, Default)]
struct Value {
    current: Option<u32>,
    saved: Option<u32>,
}

/// Which threshold a value of [`Feature::TemperatureThreshold`] is (THSEL).
pub(super) const OVER: u32 = 0;
/// The threshold below.
pub(super) const UNDER: u32 = 1;

/// The feature, if this controller has it.
pub(super) fn find(feature: Feature, config: &ControllerConfig, present: Present) -> Option<Rule> {
    let rule = RULES.into_iter().find(|rule| rule.feature == feature)?;
    let is_there = match rule.needs {
        Needs::Nothing => true,
        Needs::VolatileCache => present.volatile_cache,
        Needs::MemoryTransport => matches!(config.transport, Transport::Memory { .. }),
        Needs::Reservations => present.reservations,
    };
    is_there.then_some(rule)
}

impl Values {
    /// The value in force.
    pub(super) fn current(&self, key: Key) -> u32 {
        let value = self.table.get(&key).copied().unwrap_or_default();
        value.current.or(value.saved).unwrap_or(default_of(key))
    }

    /// The value that the next reset brings back.
    pub(super) fn saved(&self, key: Key) -> u32 {
        self.table.get(&key).and_then(|value| value.saved).unwrap_or(default_of(key))
    }

    /// Changes a value, for now or for good.
    pub(super) fn set(&mut self, key: Key, dword: u32, save: bool) {
        let value = self.table.entry(key).or_default();
        value.current = Some(dword);
        if save {
            value.saved = Some(dword);
        }
    }

    /// What is saved comes back.
    pub(super) fn reset(&mut self) {
        self.table.retain(|_, value| {
            value.current = None;
            value.saved.is_some()
        });
    }

    /// Forgets what belongs to a namespace that is gone.
    pub(super) fn forget_namespace(&mut self, nsid: u32) {
        for feature in [Feature::ErrorRecovery, Feature::ReservationNotificationMask] {
            self.table.remove(&Key { feature, of: nsid });
        }
    }

    /// Whether the volatile write cache is on (Base 2.1 §5.1.25.1.4).
    pub(super) fn write_cache_enabled(&self) -> bool {
        self.current(Key { feature: Feature::VolatileWriteCache, of: 0 }) & 1 != 0
    }

    /// Whether the host wants to hear of what this bit stands for.
    pub(super) fn wants_event(&self, bit: u32) -> bool {
        self.current(Key { feature: Feature::AsynchronousEventConfiguration, of: 0 }) & bit != 0
    }

    /// When completions are signalled.
    pub(super) fn coalescing(&self) -> Coalescing {
        let [threshold, time, ..] =
            self.current(Key { feature: Feature::InterruptCoalescing, of: 0 }).to_le_bytes();
        let time = Span::from_us(100 * u64::from(time));
        Coalescing { time, threshold: u16::from(threshold) + 1 }
    }

    /// Whether a vector is exempt from that (Base 2.1 §5.1.25.2.3).
    pub(super) fn is_coalescing_disabled(&self, vector: u16) -> bool {
        self.current(Key { feature: Feature::InterruptVectorConfiguration, of: vector.into() })
            & 1 << 16
            != 0
    }

    /// How submission queues are served.
    pub(super) fn arbitration(&self) -> Arbitration {
        let [burst, low, medium, high] =
            self.current(Key { feature: Feature::Arbitration, of: 0 }).to_le_bytes();
        let burst = burst & 7;
        Arbitration {
            burst: (burst != 7).then_some(1 << burst),
            low_weight: u16::from(low) + 1,
            medium_weight: u16::from(medium) + 1,
            high_weight: u16::from(high) + 1,
        }
    }

    /// The temperatures to be warned of.
    pub(super) fn thresholds(&self) -> Thresholds {
        let kelvin = |of| {
            let dword = self.current(Key { feature: Feature::TemperatureThreshold, of });
            u16::try_from(dword & 0xffff).unwrap_or(0)
        };
        Thresholds { over_kelvin: kelvin(OVER), under_kelvin: kelvin(UNDER) }
    }
}

/// What a value is until it is set.
pub(super) fn default_of(key: Key) -> u32 {
    match key.feature {
        // No limit to a burst, every weight 1.
        Feature::Arbitration => 7,
        Feature::TemperatureThreshold if key.of == OVER => WARNING_KELVIN.into(),
        Feature::VolatileWriteCache => 1,
        Feature::InterruptVectorConfiguration => key.of,
        _ => 0,
    }
}

/// Whether a feature may be set to this dword 11.
pub(super) fn check(
    feature: Feature,
    dword: u32,
    config: &ControllerConfig,
    ana: bool,
) -> Result<(), Status> {
    let allowed = match feature {
        Feature::Arbitration => 0xffff_ff07,
        Feature::PowerManagement => 0xff,
        Feature::TemperatureThreshold => 0x003f_ffff,
        // Time limited error recovery; no deallocated block ever reads as an error (DULBE).
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
            event_bit::WARNINGS | event_bit::TELEMETRY | notices(ana)
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

/// The notices there are, as OAES in Identify Controller tells them.
pub(super) const fn notices(ana: bool) -> u32 {
    event_bit::NAMESPACE | event_bit::FIRMWARE | if ana { event_bit::ANA } else { 0 }
}
