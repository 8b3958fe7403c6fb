//! Tests with a controller that answers from a table.

use tenmil_wire::identify::controller::IdentifyController;
use tenmil_wire::identify::list::NamespaceList;
use tenmil_wire::identify::namespace::IdentifyNamespace;
use tenmil_wire::identify::{
    Cns, namespace_identification_descriptor::NamespaceIdentifier,
    namespace_identification_descriptor::build_descriptor_list,
};
use tenmil_wire::layout::{Ascii, FieldValue};
use tenmil_wire::log::LogPage;
use tenmil_wire::log::ana::{self, AnaGroup, AnaHeader};
use tenmil_wire::log::effects::{LogPageEffects, SupportedLogPages};
use tenmil_wire::log::health::HealthInformation;
use tenmil_wire::register::{Capabilities, VERSION_2_1, offset};
use tenmil_wire::{AdminOpcode, Command, Layout, Status};

use super::{AdminAccess, AdminResult, IdentifyDocument, interrogate, show};
use tenmil_base::Error;

/// Controller with two namespaces, a SMART log and few features; other commands fail as Invalid Field.
pub struct ScriptedController {
    /// Active namespace list.
    pub namespaces: Vec<u32>,
    /// CMBLOC and CMBSZ.
    cmb: [u32; 2],
    /// What fabrics have: capsules (IOCCSZ).
    ioccsz: u32,
    submitted: Vec<Command>,
}

impl Default for ScriptedController {
    fn default() -> Self {
        Self { namespaces: vec![1, 7], cmb: [0; 2], ioccsz: 0, submitted: Vec::new() }
    }
}

impl ScriptedController {
    fn identify(&self, cns: u8, nsid: u32) -> Option<Vec<u8>> {
        match Cns::from_code(cns) {
            Cns::Controller => Some(
                IdentifyController::zeroed()
                    .with(|page| page.vid(0x1234).mn(Ascii::new("SCRIPTED")).multiple_ports(true))
                    .with(|page| page.ioccsz(self.ioccsz))
                    .to_bytes(),
            ),
            Cns::ActiveNamespaces => {
                let after = self.namespaces.iter().copied().filter(|other| *other > nsid);
                Some(NamespaceList::new(after).to_bytes())
            }
            Cns::Namespace if self.namespaces.contains(&nsid) => {
                Some(IdentifyNamespace::zeroed().with(|page| page.nsze(1 << 33)).to_bytes())
            }
            Cns::Descriptors => {
                Some(build_descriptor_list(&[NamespaceIdentifier::Eui64([9; 8])]).to_vec())
            }
            _ => None,
        }
    }

    fn log(lid: u8) -> Option<Vec<u8>> {
        match LogPage::from_code(lid) {
            LogPage::SupportedLogPages => {
                let yes = LogPageEffects::zeroed().with(|effects| effects.lsupp(true));
                let pages = SupportedLogPages::zeroed().with(|pages| pages.lid(0, yes).lid(2, yes));
                Some(pages.to_bytes())
            }
            LogPage::Health => Some(HealthInformation::zeroed().to_bytes()),
            _ => None,
        }
    }
}

impl AdminAccess for ScriptedController {
    fn read32(&mut self, offset: usize) -> u32 {
        match offset {
            offset::VS => VERSION_2_1.0,
            offset::CMBLOC => self.cmb[0],
            offset::CMBSZ => self.cmb[1],
            _ => 0,
        }
    }

    fn read64(&mut self, offset: usize) -> u64 {
        assert_eq!(offset, offset::CAP);
        Capabilities::zeroed().with(|cap| cap.mqes(1023)).0
    }

    fn execute_admin(&mut self, command: Command, len_bytes: u32) -> Result<AdminResult, Error> {
        self.submitted.push(command);
        let code = command.cdw10().to_le_bytes()[0];
        let page = match command.opcode() {
            opcode if opcode == AdminOpcode::Identify.code() => self.identify(code, command.nsid()),
            opcode if opcode == AdminOpcode::GetLogPage.code() => Self::log(code),
            opcode if opcode == AdminOpcode::GetFeatures.code() && code == 0x07 => Some(vec![]),
            _ => None,
        };
        Ok(match page {
            Some(mut bytes) => {
                bytes.resize(len_bytes as usize, 0);
                AdminResult { status: Status::SUCCESS, result: 0x000f_000f, bytes }
            }
            None => AdminResult { status: Status::INVALID_FIELD, result: 0, bytes: vec![] },
        })
    }
}

fn document() -> IdentifyDocument {
    interrogate(&mut ScriptedController::default()).unwrap()
}

#[test]
fn every_data_structure_is_decoded_in_its_section() {
    let document = document();
    let field = |path| value(&document, path).unwrap();
    let number = FieldValue::Number;
    assert_eq!(field("registers/cap/mqes"), number(1023));
    assert_eq!(field("controller/identify/vid"), number(0x1234));
    assert_eq!(field("controller/identify/mn"), FieldValue::Text("SCRIPTED".into()));
    assert_eq!(field("controller/identify/multiple_ports"), FieldValue::Flag(true));
    let FieldValue::List(active) = field("subsystem/active_namespaces/nsid") else { panic!() };
    assert_eq!(show::without_trailing_zeroes(&active), [number(1), number(7)]);
    assert_eq!(field("namespaces/7/identify/nsze"), number(1 << 33));
    assert_eq!(field("namespaces/1/descriptors/eui64"), FieldValue::Bytes(vec![9; 8]));
    assert_eq!(field("features/number_of_queues/nsq"), number(15));
    let FieldValue::List(logs) = field("logs/supported/lid") else { panic!() };
    assert_eq!(show::without_trailing_zeroes(&logs).len(), 3);
}

/// Value of the field, or of the part of one, at the end of `path` in the section before it.
fn value(document: &IdentifyDocument, path: &str) -> Option<FieldValue> {
    let (section, name) = path.rsplit_once('/').unwrap();
    let section = document.sections.iter().find(|found| found.path.join("/") == section)?;
    let fields = section.fields.iter().flat_map(|field| [field].into_iter().chain(&field.parts));
    fields.clone().find(|field| field.name == name).map(|field| field.value.clone())
}

#[test]
fn a_controller_memory_buffer_is_shown_if_there_is_one() {
    let shown = |cmb| {
        interrogate(&mut ScriptedController { cmb, ..ScriptedController::default() }).unwrap()
    };
    let document = shown([3 << 12 | 2, 4 << 12 | 2 << 8 | 1]);
    let field = |path| value(&document, path).unwrap();
    assert_eq!(field("registers/cmbloc/bir"), FieldValue::Number(2));
    assert_eq!(field("registers/cmbloc/ofst"), FieldValue::Number(3));
    assert_eq!(field("registers/cmbsz/sz"), FieldValue::Number(4));
    assert_eq!(field("registers/cmbsz/sqs"), FieldValue::Flag(true));
    assert_eq!(value(&shown([2, 1]), "registers/cmbsz/sz"), None);
}

#[test]
fn failed_commands_are_listed_with_their_status() {
    let text = show::text(&document(), false);
    assert!(
        text.contains("  Arbitration (feature 01h): Invalid Field in Command (SCT 0x0, SC 0x02)\n")
    );
}

#[test]
fn unsupported_log_pages_are_not_read() {
    let mut controller = ScriptedController::default();
    interrogate(&mut controller).unwrap();
    let logs = controller
        .submitted
        .iter()
        .filter(|command| command.opcode() == AdminOpcode::GetLogPage.code());
    let lids: Vec<u8> = logs.clone().map(|command| command.cdw10().to_le_bytes()[0]).collect();
    assert_eq!(lids, [0, 2]);
    // RAE is bit 15 of dword 10 (Base 2.1 §5.1.12): reading must not clear an event.
    assert!(logs.clone().all(|command| command.cdw10() & 1 << 15 != 0));
}

/// A controller over fabrics takes nothing else (Base 2.1 §5.1.25.1.28).
#[test]
fn fabrics_controllers_report_the_16_byte_host_identifier() {
    for (ioccsz, exhid) in [(0, 0), (4, 1)] {
        let mut controller = ScriptedController { ioccsz, ..ScriptedController::default() };
        interrogate(&mut controller).unwrap();
        let is_asked = |command: &&Command| {
            let fid = command.cdw10().to_le_bytes()[0];
            command.opcode() == AdminOpcode::GetFeatures.code() && fid == 0x81
        };
        let submitted: Vec<u32> = controller
            .submitted
            .iter()
            .filter(is_asked)
            .map(|command| command.cdw11() & 1)
            .collect();
        assert_eq!(submitted, [exhid], "IOCCSZ {ioccsz}");
    }
}

#[test]
fn text_omits_zero_fields_and_notes_it() {
    let text = show::text(&document(), false);
    assert!(text.contains("  mn                       \"SCRIPTED\""), "{text}");
    assert!(text.contains("    multiple_ports         yes"), "{text}");
    assert!(!text.contains("ssvid"));
    assert!(text.contains("fields are zero and left out; --all shows them."));
    let all = show::text(&document(), true);
    assert!(all.contains("ssvid") && !all.contains("left out"));
}

#[test]
fn unsorted_namespace_list_is_a_remote_error() {
    struct Liar(ScriptedController);
    impl AdminAccess for Liar {
        fn read32(&mut self, offset: usize) -> u32 {
            self.0.read32(offset)
        }
        fn read64(&mut self, offset: usize) -> u64 {
            self.0.read64(offset)
        }
        fn execute_admin(
            &mut self,
            command: Command,
            len_bytes: u32,
        ) -> Result<AdminResult, Error> {
            let mut result = self.0.execute_admin(command, len_bytes)?;
            if command.cdw10() == u32::from(Cns::ActiveNamespaces.code()) {
                result.bytes = NamespaceList::new([5, 5]).to_bytes();
            }
            Ok(result)
        }
    }
    let refused = interrogate(&mut Liar(ScriptedController::default())).unwrap_err();
    assert_eq!(
        refused,
        Error::remote("active namespace list: 0x5 after 0x5, expected identifiers that rise")
    );
}

#[test]
fn number_of_namespaces_read_is_that_of_the_driver() {
    let mut controller =
        ScriptedController { namespaces: (1..=1500).collect(), ..ScriptedController::default() };
    let document = interrogate(&mut controller).unwrap();
    let identified = document.sections.iter().filter(|section| section.path[0] == "namespaces");
    assert_eq!(identified.filter(|section| section.path[2] == "identify").count(), 1024);
    let is_list = |command: &&Command| {
        (command.opcode(), command.cdw10() & 0xff) == (AdminOpcode::Identify.code(), 2)
    };
    assert_eq!(controller.submitted.iter().filter(is_list).count(), 1, "one list holds as many");
}

#[test]
fn short_response_is_a_remote_error() {
    struct Short(ScriptedController);
    impl AdminAccess for Short {
        fn read32(&mut self, offset: usize) -> u32 {
            self.0.read32(offset)
        }
        fn read64(&mut self, offset: usize) -> u64 {
            self.0.read64(offset)
        }
        fn execute_admin(
            &mut self,
            command: Command,
            len_bytes: u32,
        ) -> Result<AdminResult, Error> {
            let mut result = self.0.execute_admin(command, len_bytes)?;
            result.bytes.pop();
            Ok(result)
        }
    }
    let refused = interrogate(&mut Short(ScriptedController::default())).unwrap_err();
    assert_eq!(refused.text, "Identify Controller (CNS 01h): received 4095 bytes, expected 4096");
}

/// Reports an ANA log with the given number of groups, with two namespaces each.
struct AnaLogController(ScriptedController, Vec<u8>);

impl AdminAccess for AnaLogController {
    fn read32(&mut self, offset: usize) -> u32 {
        self.0.read32(offset)
    }
    fn read64(&mut self, offset: usize) -> u64 {
        self.0.read64(offset)
    }
    fn execute_admin(&mut self, command: Command, len_bytes: u32) -> Result<AdminResult, Error> {
        let is_log = command.opcode() == AdminOpcode::GetLogPage.code();
        match LogPage::from_code(command.cdw10().to_le_bytes()[0]) {
            // Without that log, all pages are tried.
            LogPage::SupportedLogPages if is_log => {
                let (status, bytes) = (Status::INVALID_LOG_PAGE, Vec::new());
                Ok(AdminResult { status, result: 0, bytes })
            }
            LogPage::Ana if is_log => {
                let from = self.1.iter().skip(command.cdw12() as usize);
                let mut bytes: Vec<u8> = from.take(len_bytes as usize).copied().collect();
                bytes.resize(len_bytes as usize, 0);
                Ok(AdminResult { status: Status::SUCCESS, result: 0, bytes })
            }
            _ => self.0.execute_admin(command, len_bytes),
        }
    }
}

#[test]
fn ana_groups_beyond_one_chunk_are_read() {
    for count in [1, 101, 102, 103, 500] {
        let mut page = AnaHeader::zeroed().with(|header| header.ngrps(count)).to_bytes();
        for grpid in 1..=u32::from(count) {
            let group = AnaGroup::zeroed().with(|group| group.grpid(grpid));
            ana::append_ana_group(group, &[2 * grpid, 2 * grpid + 1], &mut page);
        }
        let document =
            interrogate(&mut AnaLogController(ScriptedController::default(), page)).unwrap();
        let section = document.sections.iter().find(|section| section.path == ["logs", "ana"]);
        let fields = &section.unwrap().fields;
        let groups = fields.iter().find(|field| field.name == "group").unwrap();
        let FieldValue::List(groups) = &groups.value else { panic!("{groups:?}") };
        assert_eq!(groups.len(), usize::from(count));
    }
}

#[test]
fn log_of_groups_without_an_end_is_read_up_to_64_kib() {
    // The first group has more namespaces than any log holds, so the second never begins.
    let mut page = AnaHeader::zeroed().with(|header| header.ngrps(2)).to_bytes();
    page.extend(AnaGroup::zeroed().with(|group| group.grpid(1).nnsids(u32::MAX)).to_bytes());
    let mut controller =
        CountingController(AnaLogController(ScriptedController::default(), page), 0);
    interrogate(&mut controller).unwrap();
    assert_eq!(controller.1, 16);
}

/// Counts commands for the ANA log.
struct CountingController(AnaLogController, usize);

impl AdminAccess for CountingController {
    fn read32(&mut self, offset: usize) -> u32 {
        self.0.read32(offset)
    }
    fn read64(&mut self, offset: usize) -> u64 {
        self.0.read64(offset)
    }
    fn execute_admin(&mut self, command: Command, len_bytes: u32) -> Result<AdminResult, Error> {
        let is_ana = command.opcode() == AdminOpcode::GetLogPage.code()
            && command.cdw10().to_le_bytes()[0] == LogPage::Ana.code();
        self.1 += usize::from(is_ana);
        self.0.execute_admin(command, len_bytes)
    }
}

#[test]
fn unknown_namespace_is_rejected_with_the_known_ones() {
    let mut controller =
        ScriptedController { namespaces: vec![1, 7], ..ScriptedController::default() };
    let document = interrogate(&mut controller).unwrap();
    assert_eq!(document.require_namespace("tcp://x", 7), Ok(()));
    let refused = document.require_namespace("tcp://x", 2).unwrap_err();
    let text = "identify tcp://x: no namespace 2 is shown to this host, expected one of: 1, 7";
    assert_eq!(refused.text, text);
    assert!(refused.hint.unwrap().contains("`allowed-hosts`"));
    let document = IdentifyDocument::default();
    let refused = document.require_namespace("tcp://x", 1).unwrap_err();
    assert!(refused.text.ends_with("it shows none"), "{refused}");
}
