//! A pool on a device that several URIs lead to.

use std::sync::Arc;

use base::{Backend, Limits, Medium};
use dma::Regions;
use host::Clock;

use crate::backend::ram::Ram;
use crate::backend::store::{OpenStore, Place, create};
use crate::uri::Uri;
use crate::{Kind, MediumError, Opened, Opener};

/// One namespace, whatever it is called.
struct Namespace(Arc<Ram>);

impl Medium for Namespace {
    fn limits(&self) -> Limits {
        self.0.limits()
    }

    fn channel(&self) -> Result<Box<dyn Backend>, String> {
        self.0.channel()
    }

    fn identity(&self) -> Option<String> {
        Some("uuid.1".into())
    }
}

#[test]
fn a_pool_is_open_once_whichever_uri_leads_to_its_namespace() {
    let regions = Regions::new(200);
    let ram = Arc::new(Ram::new(&regions, 512, 8 * 2048).unwrap());
    let open = |_: &Opener<'_>, _: &Uri| -> Result<Opened, MediumError> {
        Ok(Opened::fresh(Arc::new(Namespace(Arc::clone(&ram))), "a namespace"))
    };
    let more: &[(&str, &dyn Kind)] = &[("path", &open)];
    let opener = Opener { regions: &regions, clock: Clock::start(), seed: 1, more };
    let [one, two] = ["path:one", "path:two"].map(|uri| uri.parse::<Uri>().unwrap());
    create(&opener, &one, "tests", false).unwrap();
    let first = OpenStore::open(&opener, &Place::on(&one)).unwrap();
    let second = OpenStore::open(&opener, &Place::on(&two)).unwrap();
    assert!(Arc::ptr_eq(&first, &second), "two owners in one process");
    drop((first, second));
    let again = OpenStore::open(&opener, &Place::on(&two)).unwrap();
    again.claim().unwrap();
    let striped = "stripe:[path:one],[path:two]".parse().unwrap();
    let mirrored = ["path:one".parse().unwrap(), "path:two".parse().unwrap()];
    let refused = crate::mirror::create(&opener, &mirrored, true).unwrap_err().to_string();
    assert!(refused.contains("path:one and path:two are one device"), "{refused}");
    let opened = opener.open(&striped).unwrap();
    assert_eq!(opened.identities.len(), 2);
}
