//! `pcie:` URIs.
//!
//! ```text
//!   pcie:0000:5e:00.0
//!   pcie:5e:00.0?ns=2&queues=4
//! ```

use tenmil_block::uri::{Uri, UriError};
use tenmil_pci::{IommuMode, VfioInterface};

use crate::attached_controller::AttachOptions;

/// Parsed `pcie:` URI.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PcieUri {
    /// PCI address, including the domain.
    pub address: String,
    /// Options for attaching the controller.
    pub wanted: AttachOptions,
    /// How its DMA is isolated.
    pub isolation: IommuMode,
}

/// Values of `cmb`: the use of the Controller Memory Buffer.
const USES: [(&str, bool); 2] = [("no", false), ("queues", true)];
/// Values of `vfio`: the VFIO interface.
const VFIO_INTERFACES: [(&str, Option<VfioInterface>); 3] = [
    ("auto", None),
    ("iommufd", Some(VfioInterface::Iommufd)),
    ("group", Some(VfioInterface::Group)),
];
/// Values of `unsafe-no-iommu`: whether DMA without isolation is accepted.
const UNSAFE: [(&str, bool); 2] = [("no", false), ("yes", true)];

impl PcieUri {
    /// URI scheme.
    pub const SCHEME: &str = "pcie";

    /// Parses `uri`, whose scheme must be [`SCHEME`](Self::SCHEME).
    ///
    /// # Errors
    ///
    /// If the path is no PCI address, or an option is invalid.
    pub fn from_uri(uri: &Uri) -> Result<Self, UriError> {
        let Some(address) = normalize(uri.path()) else {
            let problem = format!(
                "no PCI address in `{}`, expected pcie:ADDRESS, such as pcie:0000:5e:00.0; \
                 `tenmil list` shows which there are",
                uri.path()
            );
            return Err(uri.error(problem));
        };
        let mut fields = uri.options();
        let queues_in_cmb = fields.choice_value("cmb", &USES)?.unwrap_or(false);
        let by = fields.choice_value("vfio", &VFIO_INTERFACES)?.flatten();
        let isolation = match (
            fields.choice_value("unsafe-no-iommu", &UNSAFE)?.unwrap_or(false),
            by,
        ) {
            (false, by) => IommuMode::Iommu { by },
            (true, Some(VfioInterface::Iommufd)) => {
                let problem = "vfio=iommufd with unsafe-no-iommu=yes: iommufd has no such functions, \
                               expected one of the two";
                return Err(uri.error(problem.to_owned()));
            }
            (true, _) => IommuMode::None,
        };
        let wanted =
            AttachOptions { queues_in_cmb, ..AttachOptions::from_uri_options(&mut fields)? };
        fields.reject_unconsumed()?;
        Ok(Self { address, wanted, isolation })
    }
}

/// Normalizes a PCI address: adds the domain and uses lower-case digits. None if it is not valid.
fn normalize(text: &str) -> Option<String> {
    let (place, function) = text.rsplit_once('.')?;
    let mut parts = place.rsplit(':');
    let (device, bus) = (parts.next()?, parts.next()?);
    let domain = parts.next().unwrap_or("0000");
    let is_hex = |part: &str, digits: usize| {
        part.len() == digits && part.bytes().all(|byte| byte.is_ascii_hexdigit())
    };
    let is_address = parts.next().is_none()
        && is_hex(domain, 4)
        && is_hex(bus, 2)
        && is_hex(device, 2)
        && is_hex(function, 1);
    is_address.then(|| format!("{domain}:{bus}:{device}.{function}").to_ascii_lowercase())
}

#[cfg(test)]
mod tests {
    use tenmil_pci::{IommuMode, VfioInterface};

    use super::PcieUri;

    fn parse_name(text: &str) -> Result<PcieUri, tenmil_base::Error> {
        let uri = text
            .parse()
            .map_err(|error: tenmil_block::uri::UriError| error.to_string())
            .map_err(tenmil_base::Error::environment)?;
        PcieUri::from_uri(&uri).map_err(tenmil_base::Error::environment)
    }

    #[test]
    fn uri_consists_of_address_and_options() {
        let name = parse_name("pcie:0000:5E:00.0?ns=2&queues=4").unwrap();
        assert_eq!(name.address, "0000:5e:00.0");
        assert_eq!((name.wanted.namespace, name.wanted.queues), (2, 4));
        let in_cmb = |text: &str| parse_name(text).unwrap().wanted.queues_in_cmb;
        assert!(in_cmb("pcie:5e:00.0?cmb=queues"));
        assert!(!in_cmb("pcie:5e:00.0?cmb=no") && !name.wanted.queues_in_cmb);
        assert!(parse_name("pcie:5e:00.0?cmb=data").unwrap_err().text.contains("expected"));
        assert_eq!(parse_name("pcie:5e:00.0").unwrap().address, "0000:5e:00.0");
        let isolation = |text: &str| parse_name(text).unwrap().isolation;
        assert_eq!(isolation("pcie:5e:00.0?unsafe-no-iommu=yes"), IommuMode::None);
        let behind = |by| IommuMode::Iommu { by };
        assert_eq!(isolation("pcie:5e:00.0?unsafe-no-iommu=no"), behind(None));
        assert_eq!(isolation("pcie:5e:00.0"), behind(None));
        assert_eq!(isolation("pcie:5e:00.0?vfio=auto"), behind(None));
        assert_eq!(isolation("pcie:5e:00.0?vfio=group"), behind(Some(VfioInterface::Group)));
        assert_eq!(isolation("pcie:5e:00.0?vfio=iommufd"), behind(Some(VfioInterface::Iommufd)));
        assert!(parse_name("pcie:5e:00.0?unsafe-no-iommu").is_err());
        assert!(parse_name("pcie:5e:00.0?vfio=type1").unwrap_err().text.contains("expected"));
        let both = parse_name("pcie:5e:00.0?vfio=iommufd&unsafe-no-iommu=yes").unwrap_err();
        assert!(both.text.contains("one of the two"), "{both}");
    }

    #[test]
    fn uri_without_a_pci_function_is_rejected() {
        for text in
            ["pcie:", "pcie:5e", "pcie:5e:00", "pcie:0:0.0", "pcie:1:2:3:4.0", "pcie:xx:00.0"]
        {
            let refused = parse_name(text).unwrap_err();
            assert!(refused.text.contains("expected"), "{text}: {refused}");
        }
    }
}
