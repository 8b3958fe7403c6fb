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

use super::{AdminAccess, AdminResult, IdentifyDocument, fields_of, fields_of_dword};
use tenmil_base::Error;

/// Feature with the decoder of its value.
struct FeatureDecoder {
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

const SETTINGS: [FeatureDecoder; 26] = [
    controller_feature(Feature::Arbitration, "arbitration", dword_fields::<Arbitration>),
    controller_feature(
        Feature::PowerManagement,
        "power_management",
        dword_fields::<PowerManagement>,
    ),
    namespace_feature(Feature::LbaRangeType, "lba_range_type", page_fields::<LbaRanges>),
    controller_feature(
        Feature::TemperatureThreshold,
        "temperature_threshold",
        dword_fields::<TemperatureThreshold>,
    ),
    namespace_feature(Feature::ErrorRecovery, "error_recovery", dword_fields::<ErrorRecovery>),
    controller_feature(
        Feature::VolatileWriteCache,
        "volatile_write_cache",
        dword_fields::<VolatileWriteCache>,
    ),
    controller_feature(Feature::NumberOfQueues, "number_of_queues", dword_fields::<NumberOfQueues>),
    controller_feature(
        Feature::InterruptCoalescing,
        "interrupt_coalescing",
        dword_fields::<InterruptCoalescing>,
    ),
    controller_feature(
        Feature::InterruptVectorConfiguration,
        "interrupt_vector_configuration",
        dword_fields::<InterruptVectorConfiguration>,
    ),
    controller_feature(Feature::WriteAtomicity, "write_atomicity", dword_fields::<WriteAtomicity>),
    controller_feature(
        Feature::AsynchronousEventConfiguration,
        "asynchronous_event_configuration",
        dword_fields::<AsynchronousEventConfiguration>,
    ),
    controller_feature(
        Feature::AutonomousPowerStateTransition,
        "autonomous_power_state_transition",
        dword_and_page::<AutonomousPowerStateTransition, PowerStateTransitions>,
    ),
    controller_feature(
        Feature::HostMemoryBuffer,
        "host_memory_buffer",
        dword_fields::<HostMemoryBuffer>,
    ),
    controller_feature(Feature::Timestamp, "timestamp", page_fields::<Timestamp>),
    controller_feature(Feature::KeepAliveTimer, "keep_alive_timer", dword_fields::<KeepAliveTimer>),
    controller_feature(
        Feature::HostControlledThermalManagement,
        "thermal_management",
        dword_fields::<ThermalManagement>,
    ),
    controller_feature(
        Feature::LbaStatusAttributes,
        "lba_status_attributes",
        dword_fields::<LbaStatusAttributes>,
    ),
    controller_feature(
        Feature::HostBehaviorSupport,
        "host_behavior_support",
        page_fields::<HostBehaviorSupport>,
    ),
    controller_feature(Feature::SanitizeConfig, "sanitize_config", dword_fields::<SanitizeConfig>),
    controller_feature(
        Feature::CommandSetProfile,
        "command_set_profile",
        dword_fields::<CommandSetProfile>,
    ),
    controller_feature(
        Feature::SoftwareProgressMarker,
        "software_progress",
        dword_fields::<SoftwareProgressMarker>,
    ),
    controller_feature(
        Feature::HostIdentifier,
        "host_identifier",
        dword_and_page::<HostIdentifier, HostIdentifierPage>,
    ),
    namespace_feature(
        Feature::ReservationNotificationMask,
        "reservation_notification_mask",
        dword_fields::<ReservationNotificationMask>,
    ),
    namespace_feature(
        Feature::ReservationPersistence,
        "reservation_persistence",
        dword_fields::<ReservationPersistence>,
    ),
    namespace_feature(
        Feature::NamespaceWriteProtection,
        "namespace_write_protection",
        dword_fields::<NamespaceWriteProtection>,
    ),
    controller_feature(
        Feature::NonOperationalPowerState,
        "non_operational_power_state",
        dword_fields::<NonOperationalPowerState>,
    ),
];

const fn controller_feature(
    feature: Feature,
    path: &'static str,
    decode: fn(&AdminResult) -> Vec<DecodedField>,
) -> FeatureDecoder {
    FeatureDecoder { feature, path, scope: Scope::Controller, decode }
}

const fn namespace_feature(
    feature: Feature,
    path: &'static str,
    decode: fn(&AdminResult) -> Vec<DecodedField>,
) -> FeatureDecoder {
    FeatureDecoder { feature, path, scope: Scope::Namespace, decode }
}

/// Reads all features; those of namespace scope from `namespace`, if there is one.
pub(super) fn read(
    controller: &mut dyn AdminAccess,
    document: &mut IdentifyDocument,
    namespace: Option<u32>,
) -> Result<(), Error> {
    for FeatureDecoder { feature, path, scope, decode } in &SETTINGS {
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
                let fields = page_fields::<HostIdentifierExtendedPage>(&result);
                document.add(&["features", path], title, fields);
                continue;
            }
            document.add(&["features", path], title, decode(&result));
        }
    }
    Ok(())
}

fn dword_fields<T: tenmil_wire::Layout>(result: &AdminResult) -> Vec<DecodedField> {
    fields_of_dword::<T>(result.result)
}

fn page_fields<T: tenmil_wire::Layout>(result: &AdminResult) -> Vec<DecodedField> {
    fields_of::<T>(&result.bytes)
}

fn dword_and_page<T: tenmil_wire::Layout, U: tenmil_wire::Layout>(
    result: &AdminResult,
) -> Vec<DecodedField> {
    let mut fields = dword_fields::<T>(result);
    fields.extend(page_fields::<U>(result));
    fields
}
