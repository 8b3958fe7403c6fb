//! Registers and Identify data structures.

use tenmil_wire::admin::Identify;
use tenmil_wire::identify::list::{CommandSets, ControllerList, NamespaceList};
use tenmil_wire::identify::namespace::{
    IdentifyNamespace, IdentifyNamespaceIndependent, IdentifyNamespaceNvm,
};
use tenmil_wire::identify::namespace_identification_descriptor::{
    NamespaceIdentifier, namespace_identifiers,
};
use tenmil_wire::identify::{BYTES, Cns, CommandSet, NSID_MAX};
use tenmil_wire::identify::{IdentifyController, IdentifyControllerNvm};
use tenmil_wire::layout::{DecodedField, FieldValue};
use tenmil_wire::register::{
    AdminQueueAttributes, Capabilities, Configuration, ControllerStatus, MemoryBufferLocation,
    MemoryBufferSize, ReadyTimeouts, Version, offset,
};
use tenmil_wire::{Layout, TypedCommand};

use super::{AdminAccess, IdentifyDocument, fields_of, fields_of_dword};
use tenmil_base::Error;

/// Maximum number of namespaces read: as many as the driver uses
/// ([`ControllerOptions::namespaces_max`](tenmil_nvme_host::ControllerOptions)).
const NAMESPACES_MAX: usize = 1024;

/// Reads the registers whose reads have no side effects.
pub(super) fn read_registers(controller: &mut dyn AdminAccess, document: &mut IdentifyDocument) {
    let cap = controller.read64(offset::CAP).to_le_bytes();
    let path = |name: &'static str| ["registers", name];
    document.add(&path("cap"), "CAP: Controller Capabilities", fields_of::<Capabilities>(&cap));
    let mut dword = |at: usize| controller.read32(at);
    document.add(&path("vs"), "VS: Version", fields_of_dword::<Version>(dword(offset::VS)));
    let fields = fields_of_dword::<Configuration>(dword(offset::CC));
    document.add(&path("cc"), "CC: Controller Configuration", fields);
    let fields = fields_of_dword::<ControllerStatus>(dword(offset::CSTS));
    document.add(&path("csts"), "CSTS: Controller Status", fields);
    let fields = fields_of_dword::<AdminQueueAttributes>(dword(offset::AQA));
    document.add(&path("aqa"), "AQA: Admin Queue Attributes", fields);
    let fields = fields_of_dword::<ReadyTimeouts>(dword(offset::CRTO));
    document.add(&path("crto"), "CRTO: Controller Ready Timeouts", fields);
    let size = dword(offset::CMBSZ);
    if MemoryBufferSize(size).sz() == 0 {
        return;
    }
    let fields = fields_of_dword::<MemoryBufferLocation>(dword(offset::CMBLOC));
    document.add(&path("cmbloc"), "CMBLOC: Controller Memory Buffer Location", fields);
    let fields = fields_of_dword::<MemoryBufferSize>(size);
    document.add(&path("cmbsz"), "CMBSZ: Controller Memory Buffer Size", fields);
}

/// Reads all Identify data structures and returns the active namespaces.
pub(super) fn read_identify(
    controller: &mut dyn AdminAccess,
    document: &mut IdentifyDocument,
) -> Result<Vec<u32>, Error> {
    let mut asker = IdentifyReader { controller, document };
    if let Some(bytes) = asker.bytes(Cns::Controller, 0)? {
        let identity = IdentifyController::parse(&bytes);
        asker.document.has_long_host_id =
            identity.is_ok_and(|it| it.host_identifier_128() || it.ioccsz() > 0);
        let (path, title) = (["controller", "identify"], title(Cns::Controller, 0));
        asker.document.add(&path, title, fields_of::<IdentifyController>(&bytes));
    }
    asker.page::<IdentifyControllerNvm>(&["controller", "nvm"], Cns::CommandSetController, 0)?;
    asker.page::<CommandSets>(&["controller", "command_sets"], Cns::CommandSets, 0)?;
    let list = &["subsystem", "controllers"];
    asker.page::<ControllerList>(list, Cns::SubsystemControllers, 0)?;
    let namespaces = asker.active_namespaces()?;
    let list = &["subsystem", "allocated_namespaces"];
    asker.page::<NamespaceList>(list, Cns::AllocatedNamespaces, 0)?;
    for nsid in &namespaces {
        asker.namespace(*nsid)?;
    }
    Ok(namespaces)
}

struct IdentifyReader<'a> {
    controller: &'a mut dyn AdminAccess,
    document: &'a mut IdentifyDocument,
}

impl IdentifyReader<'_> {
    fn page<T: Layout>(&mut self, path: &[&str], cns: Cns, nsid: u32) -> Result<(), Error> {
        if let Some(bytes) = self.bytes(cns, nsid)? {
            self.document.add(path, title(cns, nsid), fields_of::<T>(&bytes));
        }
        Ok(())
    }

    fn bytes(&mut self, cns: Cns, nsid: u32) -> Result<Option<Vec<u8>>, Error> {
        let csi = CommandSet::Nvm.code();
        let command = Identify { nsid, cns: cns.code(), csi, ..Identify::default() }.to_command();
        let len_bytes = u32::try_from(BYTES).expect("a page of 4 KiB");
        let result =
            self.document.execute(self.controller, &title(cns, nsid), command, len_bytes)?;
        Ok(result.map(|result| result.bytes))
    }

    /// Reads the active namespace list. A list that does not increase is invalid and could repeat
    /// forever, so it is an error.
    fn active_namespaces(&mut self) -> Result<Vec<u32>, Error> {
        let mut namespaces: Vec<u32> = Vec::new();
        let mut has_more = false;
        while namespaces.len() < NAMESPACES_MAX {
            let after = namespaces.last().copied().unwrap_or(0);
            let Some(bytes) = self.bytes(Cns::ActiveNamespaces, after)? else { break };
            let list =
                NamespaceList::parse(&bytes).map_err(|short| Error::remote(short.to_string()))?;
            let found: Vec<u32> = list.iter().collect();
            for nsid in &found {
                let last = namespaces.last().copied().unwrap_or(0);
                if *nsid <= last || *nsid > NSID_MAX {
                    return Err(Error::remote(format!(
                        "active namespace list: {nsid:#x} after {last:#x}, expected identifiers \
                         that rise"
                    )));
                }
                namespaces.push(*nsid);
            }
            // A list that is not full is the last one.
            if found.len() < NamespaceList::CAPACITY {
                break;
            }
            has_more = true;
        }
        has_more |= namespaces.len() > NAMESPACES_MAX;
        namespaces.truncate(NAMESPACES_MAX);
        let values = namespaces.iter().map(|nsid| FieldValue::Number((*nsid).into())).collect();
        let nsid = field("nsid", "Namespace Identifiers.", FieldValue::List(values));
        let title = match has_more {
            true => format!("{}, the first {NAMESPACES_MAX}", title(Cns::ActiveNamespaces, 0)),
            false => title(Cns::ActiveNamespaces, 0),
        };
        self.document.add(&["subsystem", "active_namespaces"], title, vec![nsid]);
        Ok(namespaces)
    }

    fn namespace(&mut self, nsid: u32) -> Result<(), Error> {
        let number = nsid.to_string();
        let path = |name| ["namespaces", number.as_str(), name];
        self.page::<IdentifyNamespace>(&path("identify"), Cns::Namespace, nsid)?;
        self.page::<IdentifyNamespaceNvm>(&path("nvm"), Cns::CommandSetNamespace, nsid)?;
        let independent = Cns::IndependentNamespace;
        self.page::<IdentifyNamespaceIndependent>(&path("independent"), independent, nsid)?;
        if let Some(bytes) = self.bytes(Cns::Descriptors, nsid)? {
            let fields = namespace_identifiers(&bytes).map(decode_namespace_identifier).collect();
            self.document.add(&path("descriptors"), title(Cns::Descriptors, nsid), fields);
        }
        let attached = Cns::NamespaceControllers;
        self.page::<ControllerList>(&path("controllers"), attached, nsid)
    }
}

fn decode_namespace_identifier(identifier: NamespaceIdentifier) -> DecodedField {
    match identifier {
        NamespaceIdentifier::Eui64(bytes) => {
            field("eui64", "IEEE Extended Unique Identifier.", FieldValue::Bytes(bytes.to_vec()))
        }
        NamespaceIdentifier::Nguid(bytes) => field(
            "nguid",
            "Namespace Globally Unique Identifier.",
            FieldValue::Bytes(bytes.to_vec()),
        ),
        NamespaceIdentifier::Uuid(bytes) => {
            field("uuid", "Namespace UUID.", FieldValue::Bytes(bytes.to_vec()))
        }
        NamespaceIdentifier::Csi(set) => {
            field("csi", "Command Set Identifier.", FieldValue::Code(set.code().into(), set.name()))
        }
    }
}

fn field(name: &'static str, meaning: &'static str, value: FieldValue) -> DecodedField {
    DecodedField { name, description: meaning, value, parts: Vec::new() }
}

fn title(cns: Cns, nsid: u32) -> String {
    let title = format!("{} (CNS {:02X}h)", cns.name().trim_end_matches('.'), cns.code());
    if nsid == 0 { title } else { format!("{title} of namespace {nsid}") }
}
