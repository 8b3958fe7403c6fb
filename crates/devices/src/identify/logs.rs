//! Log pages of the controller.

use tenmil_wire::Layout;
use tenmil_wire::TypedCommand;
use tenmil_wire::admin::GetLogPage;
use tenmil_wire::identify::NSID_ALL;
use tenmil_wire::identify::list::NamespaceList;
use tenmil_wire::layout::{DecodedField, FieldValue};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::ana::{AnaHeader, parse_ana_groups};
use tenmil_wire::log::effects::{
    CommandsEffects, FeaturesEffects, LogPageEffects, ManagementEffects, SupportedLogPages,
};
use tenmil_wire::log::error_information;
use tenmil_wire::log::event::ReservationNotification;
use tenmil_wire::log::firmware::{FirmwareSlots, TelemetryController, TelemetryHost};
use tenmil_wire::log::health::HealthInformation;
use tenmil_wire::log::sanitize::SanitizeStatus;
use tenmil_wire::log::self_test::SelfTestPage;

use super::{AdminAccess, IdentifyDocument, fields_of};
use tenmil_base::Error;

/// Log page that is read whole, or as far as its header needs.
struct LogPageDecoder {
    page: LogPage,
    path: &'static str,
    len_bytes: u32,
    decode: fn(&[u8]) -> Vec<DecodedField>,
}

/// Size of the Error Information log that is read: one page of entries.
const ERROR_BYTES: u32 = 64 * 64;

/// Chunk size and maximum number of chunks of the ANA log: enough for 128 groups of 8 000 namespaces in
/// total.
const ANA_BYTES: u32 = 4096;
const ANA_PIECES: u64 = 16;

/// Log pages with their paths in the document.
const PAGES: [LogPageDecoder; 14] = [
    LogPageDecoder::of::<SupportedLogPages>(LogPage::SupportedLogPages, "supported"),
    LogPageDecoder {
        page: LogPage::ErrorInformation,
        path: "errors",
        len_bytes: ERROR_BYTES,
        decode: error_entries,
    },
    LogPageDecoder::of::<HealthInformation>(LogPage::Health, "health"),
    LogPageDecoder::of::<FirmwareSlots>(LogPage::FirmwareSlot, "firmware_slots"),
    LogPageDecoder::of::<NamespaceList>(LogPage::ChangedNamespaces, "changed_namespaces"),
    LogPageDecoder::of::<CommandsEffects>(LogPage::CommandEffects, "command_effects"),
    LogPageDecoder::of::<SelfTestPage>(LogPage::SelfTest, "self_test"),
    LogPageDecoder::of::<TelemetryHost>(LogPage::TelemetryHost, "telemetry_host"),
    LogPageDecoder::of::<TelemetryController>(LogPage::TelemetryController, "telemetry_controller"),
    LogPageDecoder { page: LogPage::Ana, path: "ana", len_bytes: ANA_BYTES, decode: ana_groups },
    LogPageDecoder::of::<FeaturesEffects>(LogPage::FeatureEffects, "feature_effects"),
    LogPageDecoder::of::<ManagementEffects>(LogPage::ManagementEffects, "management_effects"),
    LogPageDecoder::of::<ReservationNotification>(LogPage::ReservationNotification, "reservation"),
    LogPageDecoder::of::<SanitizeStatus>(LogPage::SanitizeStatus, "sanitize"),
];

impl LogPageDecoder {
    const fn of<T: Layout>(page: LogPage, path: &'static str) -> Self {
        assert!(T::BYTES <= 4096, "a page that fits into a page");
        #[expect(clippy::cast_possible_truncation, reason = "asserted above")]
        let len_bytes = T::BYTES as u32;
        Self { page, path, len_bytes, decode: fields_of::<T> }
    }
}

/// Reads all log pages that the controller supports.
pub(super) fn read(
    controller: &mut dyn AdminAccess,
    document: &mut IdentifyDocument,
) -> Result<(), Error> {
    let mut supported = None;
    for page in &PAGES {
        let lid = page.page.code();
        if supported.as_ref().is_some_and(|pages| !is_log_page_supported(pages, lid)) {
            continue;
        }
        let title = format!("{} (log page {lid:02X}h)", page.page.name().trim_end_matches('.'));
        // Retain Asynchronous Event (RAE): reading leaves pending events pending.
        let command =
            GetLogPage { nsid: NSID_ALL, rae: true, ..GetLogPage::new(lid, page.len_bytes) };
        let result = document.execute(controller, &title, command.to_command(), page.len_bytes)?;
        let Some(mut result) = result else { continue };
        if page.page == LogPage::Ana {
            read_remaining_ana_groups(controller, document, &title, &mut result.bytes)?;
        }
        document.add(&["logs", page.path], title, (page.decode)(&result.bytes));
        if page.page == LogPage::SupportedLogPages {
            supported = SupportedLogPages::parse(&result.bytes).ok();
        }
    }
    Ok(())
}

/// Reads further chunks until all ANA groups counted in the header are present.
fn read_remaining_ana_groups(
    controller: &mut dyn AdminAccess,
    document: &mut IdentifyDocument,
    title: &str,
    bytes: &mut Vec<u8>,
) -> Result<(), Error> {
    let reported = AnaHeader::parse(bytes).map_or(0, |header| usize::from(header.ngrps()));
    for piece in 1..ANA_PIECES {
        if parse_ana_groups(bytes).count() >= reported {
            break;
        }
        let lpo = piece * u64::from(ANA_BYTES);
        let log = GetLogPage::new(LogPage::Ana.code(), ANA_BYTES);
        let command = GetLogPage { nsid: NSID_ALL, rae: true, lpo, ..log }.to_command();
        let Some(more) = document.execute(controller, title, command, ANA_BYTES)? else { break };
        bytes.extend(more.bytes);
    }
    Ok(())
}

fn is_log_page_supported(pages: &SupportedLogPages, lid: u8) -> bool {
    pages.lid(lid.into()).is_some_and(|effects: LogPageEffects| effects.lsupp())
}

/// Entries of the Error Information log, without unused ones.
fn error_entries(bytes: &[u8]) -> Vec<DecodedField> {
    let entries = error_information::error_entries(bytes)
        .map(|entry| FieldValue::Structure(entry.decode_fields()));
    let value = FieldValue::List(entries.collect());
    vec![DecodedField {
        name: "entry",
        description: "Error entries, newest first.",
        value,
        parts: vec![],
    }]
}

fn ana_groups(bytes: &[u8]) -> Vec<DecodedField> {
    let mut fields = fields_of::<AnaHeader>(bytes);
    let groups = parse_ana_groups(bytes).map(|(group, namespaces)| {
        let nsids = namespaces.map(|nsid| FieldValue::Number(nsid.into())).collect();
        let mut fields = group.decode_fields();
        let value = FieldValue::List(nsids);
        fields.push(DecodedField {
            name: "nsid",
            description: "Its namespaces.",
            value,
            parts: vec![],
        });
        FieldValue::Structure(fields)
    });
    let value = FieldValue::List(groups.collect());
    fields.push(DecodedField { name: "group", description: "Groups.", value, parts: vec![] });
    fields
}
