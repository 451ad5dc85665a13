/* Show openapi.json by Swagger UI, with the key that the page of photos may have been given. */

const ui = SwaggerUIBundle({
  url: "openapi.json",
  domNode: document.getElementById("api"),
  deepLinking: true,
  defaultModelsExpandDepth: 0,
  displayRequestDuration: true,
  validatorUrl: null, // otherwise it sends the description's address to a public server
  onComplete() {
    const key = sessionStorage.getItem("falconet-api-key");
    if (key) ui.preauthorizeApiKey("bearer", key);
  },
});
