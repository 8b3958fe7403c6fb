//! Current values of the features.

use tenmil_wire::TypedCommand;
use tenmil_wire::admin::GetFeatures;
use tenmil_wire::feature::Feature;
use tenmil_wire::feature::identity::{
    HostIdentifier, HostIdentifierExtendedPage, HostIdentifierPage, ReservationNotificationMask,
    ReservationPersistence, SoftwareProgressMarker,
};
use tenmil_wire::feature::media::{
    ErrorRecovery, LbaRanges, LbaStatusAttributes, NamespaceWriteProtection, SanitizeConfig,
    VolatileWriteCache, WriteAtomicity,
};
use tenmil_wire::feature::power::{
    AutonomousPowerStateTransition, HostMemoryBuffer, NonOperationalPowerState, PowerManagement,
    PowerStateTransitions, TemperatureThreshold, ThermalManagement, Timestamp,
};
use tenmil_wire::feature::queue::{
    Arbitration, AsynchronousEventConfiguration, CommandSetProfile, HostBehaviorSupport,
    InterruptCoalescing, InterruptVectorConfiguration, KeepAliveTimer, NumberOfQueues,
};
use tenmil_wire::layout::DecodedField;

use super::{AdminResult, Controller, Document, fields_of, fields_of_dword};
use tenmil_base::Error;

/// Feature with the decoder of its value.
struct Setting {
    feature: Feature,
    path: &'static str,
    scope: Scope,
    decode: fn(&AdminResult) -> Vec<DecodedField>,
}

/// Scope of a feature (Base 2.1 §5.1.25, figure 403).
#[derive(Clone, Copy, PartialEq, Eq)]
enum Scope {
    Controller,
    Namespace,
}

const SETTINGS: [Setting; 26] = [
    of(Feature::Arbitration, "arbitration", dword::<Arbitration>),
    of(Feature::PowerManagement, "power_management", dword::<PowerManagement>),
    of_namespace(Feature::LbaRangeType, "lba_range_type", page::<LbaRanges>),
    of(Feature::TemperatureThreshold, "temperature_threshold", dword::<TemperatureThreshold>),
    of_namespace(Feature::ErrorRecovery, "error_recovery", dword::<ErrorRecovery>),
    of(Feature::VolatileWriteCache, "volatile_write_cache", dword::<VolatileWriteCache>),
    of(Feature::NumberOfQueues, "number_of_queues", dword::<NumberOfQueues>),
    of(Feature::InterruptCoalescing, "interrupt_coalescing", dword::<InterruptCoalescing>),
    of(
        Feature::InterruptVectorConfiguration,
        "interrupt_vector_configuration",
        dword::<InterruptVectorConfiguration>,
    ),
    of(Feature::WriteAtomicity, "write_atomicity", dword::<WriteAtomicity>),
    of(
        Feature::AsynchronousEventConfiguration,
        "asynchronous_event_configuration",
        dword::<AsynchronousEventConfiguration>,
    ),
    of(
        Feature::AutonomousPowerStateTransition,
        "autonomous_power_state_transition",
        both::<AutonomousPowerStateTransition, PowerStateTransitions>,
    ),
    of(Feature::HostMemoryBuffer, "host_memory_buffer", dword::<HostMemoryBuffer>),
    of(Feature::Timestamp, "timestamp", page::<Timestamp>),
    of(Feature::KeepAliveTimer, "keep_alive_timer", dword::<KeepAliveTimer>),
    of(Feature::HostControlledThermalManagement, "thermal_management", dword::<ThermalManagement>),
    of(Feature::LbaStatusAttributes, "lba_status_attributes", dword::<LbaStatusAttributes>),
    of(Feature::HostBehaviorSupport, "host_behavior_support", page::<HostBehaviorSupport>),
    of(Feature::SanitizeConfig, "sanitize_config", dword::<SanitizeConfig>),
    of(Feature::CommandSetProfile, "command_set_profile", dword::<CommandSetProfile>),
    of(Feature::SoftwareProgressMarker, "software_progress", dword::<SoftwareProgressMarker>),
    of(Feature::HostIdentifier, "host_identifier", both::<HostIdentifier, HostIdentifierPage>),
    of_namespace(
        Feature::ReservationNotificationMask,
        "reservation_notification_mask",
        dword::<ReservationNotificationMask>,
    ),
    of_namespace(
        Feature::ReservationPersistence,
        "reservation_persistence",
        dword::<ReservationPersistence>,
    ),
    of_namespace(
        Feature::NamespaceWriteProtection,
        "namespace_write_protection",
        dword::<NamespaceWriteProtection>,
    ),
    of(
        Feature::NonOperationalPowerState,
        "non_operational_power_state",
        dword::<NonOperationalPowerState>,
    ),
];

const fn of(
    feature: Feature,
    path: &'static str,
    decode: fn(&AdminResult) -> Vec<DecodedField>,
) -> Setting {
    Setting { feature, path, scope: Scope::Controller, decode }
}

const fn of_namespace(
    feature: Feature,
    path: &'static str,
    decode: fn(&AdminResult) -> Vec<DecodedField>,
) -> Setting {
    Setting { feature, path, scope: Scope::Namespace, decode }
}

/// Reads all features; those of namespace scope from `namespace`, if there is one.
pub(super) fn read(
    controller: &mut dyn Controller,
    document: &mut Document,
    namespace: Option<u32>,
) -> Result<(), Error> {
    for Setting { feature, path, scope, decode } in &SETTINGS {
        let nsid = match (scope, namespace) {
            (Scope::Controller, _) => 0,
            (Scope::Namespace, Some(nsid)) => nsid,
            (Scope::Namespace, None) => continue,
        };
        let name = feature.name().trim_end_matches('.');
        let title = format!("{name} (feature {:02X}h)", feature.code());
        // EXHID: over fabrics only the 128-bit host identifier is allowed (Base 2.1 §5.1.25.1.28).
        let is_long = *feature == Feature::HostIdentifier && document.has_long_host_id;
        let cdw11 = u32::from(is_long);
        let command = GetFeatures { nsid, fid: feature.code(), cdw11, ..GetFeatures::default() };
        let len_bytes = u32::try_from(feature.len_bytes(is_long)).expect("a page at most");
        let result = document.execute(controller, &title, command.to_command(), len_bytes)?;
        if let Some(result) = result {
            if is_long {
                let fields = page::<HostIdentifierExtendedPage>(&result);
                document.add(&["features", path], title, fields);
                continue;
            }
            document.add(&["features", path], title, decode(&result));
        }
    }
    Ok(())
}

fn dword<T: tenmil_wire::Layout>(result: &AdminResult) -> Vec<DecodedField> {
    fields_of_dword::<T>(result.result)
}

fn page<T: tenmil_wire::Layout>(result: &AdminResult) -> Vec<DecodedField> {
    fields_of::<T>(&result.bytes)
}

fn both<T: tenmil_wire::Layout, U: tenmil_wire::Layout>(result: &AdminResult) -> Vec<DecodedField> {
    let mut fields = dword::<T>(result);
    fields.extend(page::<U>(result));
    fields
}
